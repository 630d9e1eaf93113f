"""Test problems: their description, their inputs, and how a result is compared with the oracle."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import natten_jax
from tests.support import oracle
from tests.support.compilation import QUICK_HOST_OPTIONS, accepted_options
from tests.support.families import BOUNDS, Family

Shape = tuple[int, ...]

OPERATORS: Mapping[int, Callable[..., Any]] = {1: natten_jax.na1d, 2: natten_jax.na2d, 3: natten_jax.na3d}

#: A result whose terms cancel is compared with this share of their magnitude instead of with its own norm: it is
#: exactly zero for a scale of 0, and almost zero for windows of one or two keys, whose softmax is nearly constant.
#: With the bound of float32, 2e-6, it allows an error of 1e-7 of the terms: not two roundings of one of them.
CANCELLATION = 0.05


#: Each problem is compiled for one run of microseconds, so optimisation would be most of the suite's time: of the code
#: on a CPU, of the choice among kernels for a product of matrices on a GPU.
QUICK_COMPILATION = accepted_options(
    QUICK_HOST_OPTIONS
    if jax.default_backend() == "cpu"
    else {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
)


#: Operands that tests give in the element type of logits.
OF_LOGITS = ("scale", "relative_bias", "key_bias", "sinks")


@dataclasses.dataclass(frozen=True)
class Case:
    """One neighborhood attention problem, or, with ``queries``, one attention problem.

    Attributes:
        layout: Token layout of key and value, and of the query unless ``queries`` says otherwise.
        kernel_size: Window; ``None`` is the whole layout.
        stride: Queries that share a window.
        dilation: Distance of neighbors.
        is_causal: Causal dimensions.
        edges: What becomes of windows at the ends of each dimension.
        batch: Batch size.
        heads: Query heads.
        heads_kv: Key/value heads.
        head_dim: Width of query and key.
        head_dim_v: Width of value; ``None`` is ``head_dim``.
        scale: Scale; ``None`` is the default.
        scales: An operand in its place: an array of one scale for each query head, or of one without dimensions.
        additional: Additional key/value tokens.
        fused: Whether they are to be processed by the same kernel.
        queries: Query tokens of plain attention, whose layout is that of the keys.
        box: Extents of the box of the layout that the queries are.
        origins: Where it begins: once, or for each entry of the batch.
        extents: How much of the layout is real, for each entry of the batch. Padding is NaN. Of plain attention, keys.
        query_lengths: How many queries of plain attention are real.
        upsample: Queries for each token, along each dimension.
        relative_bias: Whether logits have one.
        key_bias: Whether keys have biases: ``"tokens"`` the same for every head, ``"heads"`` one for each; ``None``.
        hidden: Share of these that are ``-inf``.
        sinks: Whether heads have sinks.
    """

    layout: Shape
    kernel_size: Shape | None = None
    stride: Shape | None = None
    dilation: Shape | None = None
    is_causal: tuple[bool, ...] | None = None
    edges: tuple[str, ...] | None = None
    batch: int = 1
    heads: int = 1
    heads_kv: int = 1
    head_dim: int = 8
    head_dim_v: int | None = None
    scale: float | None = None
    scales: tuple[float, ...] | None = None
    additional: int = 0
    fused: bool = False
    queries: int | None = None
    box: Shape | None = None
    origins: tuple[Shape, ...] | None = None
    extents: tuple[Shape, ...] | None = None
    query_lengths: tuple[int, ...] | None = None
    upsample: Shape | None = None
    relative_bias: bool = False
    key_bias: str | None = None
    hidden: float = 0.0
    sinks: bool = False

    @property
    def query_layout(self) -> Shape:
        """Token layout of the query."""
        if self.queries is not None:
            return (self.queries,)
        finer = self.upsample or (1,) * self.rank
        return tuple(n * factor for n, factor in zip(self.box or self.layout, finer, strict=True))

    @property
    def is_placed(self) -> bool:
        """Whether the queries are not simply those of the layout."""
        return any(each is not None for each in (self.origins, self.extents, self.query_lengths, self.upsample))

    @property
    def is_padded(self) -> bool:
        """Whether there is padding."""
        return self.extents is not None or self.query_lengths is not None

    def entry_facts(self) -> list[tuple[Shape, Shape]]:
        """Origin and extents of each entry of the batch, written out."""
        origins = self.origins or ((0,) * self.rank,)
        origins = origins if len(origins) == self.batch else origins * self.batch
        return list(zip(origins, self.extents or (self.layout,) * self.batch, strict=True))

    def real_keys(self) -> np.ndarray:
        """Which keys are none of the padding, ``[batch, *layout]``."""
        indices = np.indices(self.layout)
        return np.stack(
            [np.all([i < n for i, n in zip(indices, real, strict=True)], axis=0) for _, real in self.entry_facts()]
        )

    def real_queries(self) -> np.ndarray:
        """Which queries are none of the padding, ``[batch, *query_layout]``."""
        if self.queries is not None:
            lengths = self.query_lengths or (self.queries,) * self.batch
            return np.stack([np.arange(self.queries) < length for length in lengths])
        indices, finer = np.indices(self.query_layout), self.upsample or (1,) * self.rank
        return np.stack(
            [
                np.all(
                    [first + i // f < n for i, f, first, n in zip(indices, finer, origin, real, strict=True)], axis=0
                )
                for origin, real in self.entry_facts()
            ]
        )

    @property
    def rank(self) -> int:
        """Number of token dimensions."""
        return len(self.layout)

    @property
    def causal(self) -> tuple[bool, ...]:
        """Causal dimensions, written out."""
        return self.is_causal or (False,) * self.rank

    @property
    def window_arguments(self) -> dict[str, Any]:
        """``kernel_size``, ``stride``, ``dilation``, ``is_causal`` and ``edges``, written out."""
        ones = (1,) * self.rank
        return {
            "kernel_size": self.kernel_size or self.layout,
            "stride": self.stride or ones,
            "dilation": self.dilation or ones,
            "is_causal": self.causal,
            "edges": self.edges or ("shift",) * self.rank,
        }

    def with_heads(self, heads: int, heads_kv: int) -> Case:
        """The problem with other heads, whose scales are these in turn."""
        scales = self.scales if self.scales is None or len(self.scales) == 1 else (self.scales * heads)[:heads]
        return dataclasses.replace(self, heads=heads, heads_kv=heads_kv, scales=scales)

    def fitted(self, family: Family) -> Case:
        """The problem with head dimensions that the family has."""
        step = family.head_dim_step

        def fit(width: int) -> int:
            return -(-width // step) * step

        head_dim_v = None if self.head_dim_v is None else fit(self.head_dim_v)
        return dataclasses.replace(self, head_dim=fit(self.head_dim), head_dim_v=head_dim_v)

    def with_edges_of(self, family: Family, *, is_direct: bool = False) -> Case:
        """The problem with edges of windows that the family has: through the operators, or in its own passes."""
        if self.edges is None:
            return self
        backend = family.backend
        edges = [edge if edge in backend.edges else "shift" for edge in self.edges]
        for i, (edge, extent) in enumerate(zip(edges, self.layout, strict=True)):
            tokens = extent // self.window_arguments["dilation"][i]
            is_ragged = tokens % self.window_arguments["stride"][i] != 0
            if edge == "wrap" and backend.wraps_by_strips and (is_direct or is_ragged):
                edges[i] = "cut"
        return dataclasses.replace(self, edges=tuple(edges))

    def mask(self) -> np.ndarray:
        """Visibility ``[query tokens, key tokens]`` by the oracle; of each entry of the batch where they differ."""
        if self.is_placed:
            return np.stack([self._mask_of_entry(i, *facts) for i, facts in enumerate(self.entry_facts())])
        if self.queries is not None:
            return oracle.attention_mask(self.queries, self.layout[0], self.causal[0])
        return oracle.neighborhood_mask(self.layout, **self.window_arguments)

    def _mask_of_entry(self, number: int, origin: Shape, extents: Shape) -> np.ndarray:
        if self.queries is None:
            return oracle.placed_mask(
                self.layout,
                **self.window_arguments,
                queries=self.query_layout,
                origin=origin,
                upsample=self.upsample or (1,) * self.rank,
                extents=extents,
            )
        mask = oracle.attention_mask(origin[0] + self.queries, self.layout[0], self.causal[0])[origin[0] :]
        mask[:, extents[0] :] = False
        if self.query_lengths is not None:
            mask[self.query_lengths[number] :] = False
        return mask

    def place_arguments(self) -> dict[str, Any]:
        """Arguments that say where tokens lie, as the operators take them."""
        given: dict[str, Any] = {}
        if self.origins is not None:
            per_entry = len(self.origins) > 1
            given["query_origin"] = jnp.asarray(self.origins if per_entry else self.origins[0], jnp.int32)
        if self.queries is not None:
            lengths = {"kv_lengths": self.extents and [n for (n,) in self.extents], "query_lengths": self.query_lengths}
            return given | {name: jnp.asarray(each, jnp.int32) for name, each in lengths.items() if each is not None}
        if self.extents is not None:
            given["extents"] = jnp.asarray(self.extents, jnp.int32)
        return given if self.upsample is None else given | {"upsample": self.upsample}

    @property
    def actual_scale(self) -> float:
        """The scale, written out."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    def operands(self, dtype: str, seed: int) -> oracle.Tensors:
        """Random normal operands as JAX arrays."""
        return jax.tree.map(jax.device_put, self.host_operands(dtype, seed))

    def host_operands(self, dtype: str, seed: int) -> oracle.Tensors:
        """The same as NumPy arrays."""
        rng = np.random.default_rng(seed)
        width_v = self.head_dim_v or self.head_dim
        queries = self.query_layout

        def draw(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape).astype(jnp.dtype(dtype))

        drawn = oracle.Tensors(
            draw(self.batch, *queries, self.heads, self.head_dim),
            draw(self.batch, *self.layout, self.heads_kv, self.head_dim),
            draw(self.batch, *self.layout, self.heads_kv, width_v),
            draw(self.batch, self.additional, self.heads_kv, self.head_dim) if self.additional else None,
            draw(self.batch, self.additional, self.heads_kv, width_v) if self.additional else None,
            None
            if self.scales is None
            else np.asarray(self.scales if self.scales[1:] else self.scales[0], lse_dtype(dtype)),
            *self._logit_terms(lse_dtype(dtype), seed),
        )
        return self.padded_with(math.nan, drawn)

    def padded_with(self, number: float, operands: oracle.Tensors) -> oracle.Tensors:
        """The operands, with a number in all that is padding."""
        if not self.is_padded:
            return operands
        real_queries, real_keys = (each[..., None, None] for each in (self.real_queries(), self.real_keys()))

        def padded(array: np.ndarray, is_real: np.ndarray) -> np.ndarray:
            return np.where(is_real, array, np.asarray(number, array.dtype))

        query, key, value, *others = operands
        found = oracle.Tensors(padded(query, real_queries), padded(key, real_keys), padded(value, real_keys), *others)
        if found.key_bias is None:
            return found
        of_keys = self.real_keys() if self.key_bias == "tokens" else self.real_keys()[:, None]
        return found._replace(key_bias=padded(found.key_bias, of_keys))

    def _logit_terms(self, dtype: str, seed: int) -> tuple[np.ndarray | None, ...]:
        """Relative bias, bias of keys and sinks."""
        rng = np.random.default_rng([seed, 4])
        window = self.kernel_size or self.layout
        heads = (self.heads,) if self.key_bias == "heads" else ()
        table = rng.standard_normal((self.heads, *(2 * size - 1 for size in window)))
        of_keys = rng.standard_normal((self.batch, *heads, *self.layout))
        of_keys[rng.random(of_keys.shape) < self.hidden] = -np.inf
        sinks = rng.standard_normal(self.heads)
        asked = (table, self.relative_bias), (of_keys, self.key_bias is not None), (sinks, self.sinks)
        return tuple([array.astype(dtype) if is_asked else None for array, is_asked in asked])

    def entries(self) -> np.ndarray | None:
        """Of the relative bias, by the oracle."""
        if not self.relative_bias:
            return None
        found = oracle.relative_entries(self.layout, **self.window_arguments)
        if not self.is_placed:
            return found
        by_query = found.reshape(*self.layout, -1)
        boxes = [
            by_query[tuple(slice(a, a + n) for a, n in zip(origin, self.query_layout, strict=True))]
            for origin, _ in self.entry_facts()
        ]
        return np.stack(boxes).reshape(self.batch, -1, found.shape[1])

    def cotangents(self, dtype: str, seed: int) -> tuple[jax.Array, jax.Array]:
        """Random cotangents of output and logsumexp."""
        out, lse = self.host_cotangents(dtype, seed)
        return jax.device_put(out), jax.device_put(lse)

    def host_cotangents(self, dtype: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """The same as NumPy arrays."""
        rng = np.random.default_rng([seed, 1])
        shape = (self.batch, *self.query_layout, self.heads)
        out = 0.05 * rng.standard_normal((*shape, self.head_dim_v or self.head_dim))
        lse = 0.05 * rng.standard_normal(shape)
        if self.is_padded:
            is_real = self.real_queries()[..., None]
            out, lse = np.where(is_real[..., None], out, math.nan), np.where(is_real, lse, math.nan)
        return out.astype(jnp.dtype(dtype)), lse.astype(lse_dtype(dtype))

    def operator(self, backend: str | None = None, **arguments: Any) -> Callable[[oracle.Tensors], tuple[Any, Any]]:
        """The public function on this problem: operands to output and logsumexp."""

        def run(operands: oracle.Tensors) -> tuple[Any, Any]:
            query, key, value, additional_keys, additional_values, scale, *terms = operands
            given = zip(("relative_bias", "key_bias", "sinks"), terms, strict=True)
            common = {
                "scale": self.scale if scale is None else scale,
                "backend": backend,
                "return_lse": True,
                **self.place_arguments(),
                **{name: array for name, array in given if array is not None},
                **arguments,
            }
            if self.queries is not None:
                return natten_jax.attention(query, key, value, is_causal=self.causal[0], **common)
            return OPERATORS[self.rank](
                query,
                key,
                value,
                additional_keys=additional_keys,
                additional_values=additional_values,
                try_fuse_additional_kv=self.fused,
                **{**self.window_arguments, **common},
            )

        return run


def lse_dtype(dtype: str) -> str:
    """Element type of the logsumexp."""
    return "float64" if dtype == "float64" else "float32"


def element_types(dtype: str) -> contextlib.AbstractContextManager[Any]:
    """A context in which JAX has the element type: 64-bit ones are off otherwise."""
    return jax.enable_x64(dtype == "float64")


def relative_error(result: Any, reference: np.ndarray, magnitude: np.ndarray) -> float:
    """``||result - reference|| / ||reference||``, where cancellation leaves so much of the reference."""
    result = np.asarray(result).astype(np.float64)
    if result.shape != reference.shape:
        raise AssertionError(f"shape {result.shape} instead of {reference.shape}")
    is_empty = reference == -np.inf  # logsumexp of no key
    if is_empty.any():
        if (result[is_empty] != -np.inf).any():
            raise AssertionError("a row that sees no key has a logsumexp other than -inf")
        result, reference, magnitude = (np.where(is_empty, 0, each) for each in (result, reference, magnitude))
    distance = float(np.linalg.norm(result - reference))
    size = max(float(np.linalg.norm(reference)), CANCELLATION * float(np.linalg.norm(magnitude)))
    if size == 0:
        return 0.0 if distance == 0 else math.inf
    return distance / size


Results = tuple[tuple[jax.Array, jax.Array], oracle.Tensors]


def value_and_gradients(
    function: Callable[[oracle.Tensors], tuple[Any, Any]], operands: oracle.Tensors, cotangents: tuple[Any, Any]
) -> Results:
    """Both passes in one compiled program."""
    return all_values_and_gradients([function], [operands], [cotangents])[0]


def all_values_and_gradients(
    functions: Sequence[Callable[[oracle.Tensors], tuple[Any, Any]]],
    operands: Sequence[oracle.Tensors],
    cotangents: Sequence[tuple[Any, Any]],
) -> list[Results]:
    """Both passes of several functions in one compiled program: compiling takes long, and much of it but once."""

    @functools.partial(jax.jit, compiler_options=QUICK_COMPILATION)
    def run(operands: Sequence[oracle.Tensors], cotangents: Sequence[tuple[Any, Any]]) -> Any:
        results = []
        for function, own, cotangent in zip(functions, operands, cotangents, strict=True):
            outputs, pullback = jax.vjp(function, own)
            results.append((outputs, pullback(cotangent)[0]))
        return results

    return run(operands, cotangents)


def errors(case: Case, outputs: tuple[Any, Any], gradients: oracle.Tensors | None, seed: int) -> dict[str, float]:
    """Error of each result of ``case`` on the inputs that ``seed`` makes."""
    return errors_of(expected_results(case, outputs[0].dtype.name, seed), outputs, gradients)


@functools.lru_cache(maxsize=128)
def expected_results(case: Case, dtype: str, seed: int) -> oracle.Reference:
    """The oracle's results of ``case`` on the inputs that ``seed`` makes: the same for every backend."""
    return expected_of(case, case.host_operands(dtype, seed), case.host_cotangents(dtype, seed))


def expected_of(case: Case, operands: oracle.Tensors, cotangents: tuple[Any, Any]) -> oracle.Reference:
    """The oracle's results of ``case`` on given inputs."""
    operands = oracle.Tensors(*(a if a is None else np.asarray(a) for a in operands))
    out, lse = map(np.asarray, cotangents)
    if not case.is_padded:
        return oracle.reference(operands, case.mask(), case.actual_scale, out, lse, entries=case.entries())
    is_real = case.real_queries()
    out, lse = np.where(is_real[..., None, None], out, 0), np.where(is_real[..., None], lse, 0)
    flat, operands = is_real.reshape(case.batch, -1), case.padded_with(0, operands)
    return oracle.reference(operands, case.mask(), case.actual_scale, out, lse, flat, case.entries())


def errors_of(
    expected: oracle.Reference, outputs: tuple[Any, Any], gradients: oracle.Tensors | None
) -> dict[str, float]:
    """Error of each result."""
    found = dict(zip(("out", "lse"), outputs, strict=True))
    pairs = {name: (getattr(expected.forward, name), getattr(expected.forward_magnitude, name)) for name in found}
    if gradients is not None:
        for name, gradient in gradients._asdict().items():
            reference = getattr(expected.gradients, name)
            assert (gradient is None) == (reference is None), name
            if gradient is not None:
                assert gradient.dtype == outputs[name in OF_LOGITS].dtype, name
                found[f"d_{name}"] = gradient
                pairs[f"d_{name}"] = reference, getattr(expected.gradient_magnitude, name)
    return {name: relative_error(found[name], *pairs[name]) for name in found}


def check(
    case: Case,
    family: Family,
    dtype: str,
    seed: int = 0,
    record: Callable[[str, object], None] | None = None,
    **arguments: Any,
) -> None:
    """Compare both passes of a backend with the oracle.

    Args:
        case: The problem.
        family: Whose backend runs it.
        dtype: Element type of the operands.
        seed: Of the random operands.
        record: pytest's ``record_property``.
        **arguments: More arguments of the operator, tile shapes for example.
    """
    check_all([Trial(case, dtype, seed, arguments)], family, record)


class Trial(NamedTuple):
    """A problem to be compared with the oracle.

    Attributes:
        case: The problem.
        dtype: Element type of the operands.
        seed: Of the random operands.
        arguments: More arguments of the operator, tile shapes for example.
    """

    case: Case
    dtype: str
    seed: int = 0
    arguments: Mapping[str, Any] = MappingProxyType({})


def check_all(
    trials: Sequence[Trial],
    family: Family,
    record: Callable[[str, object], None] | None = None,
    at_once: int = 8,
    slack: float = 1.0,
) -> None:
    """Compare both passes of a backend with the oracle for several problems, ``at_once`` in one compiled program.

    Args:
        trials: The problems.
        family: Whose backend runs them.
        record: pytest's ``record_property``.
        at_once: How many are in one program.
        slack: How many times the bounds errors may be.

    Raises:
        AssertionError: Names every problem whose results are wrong.
    """
    failures = []
    for double in (False, True):
        alike = [trial for trial in trials if (trial.dtype == "float64") == double]
        for start in range(0, len(alike), at_once):
            with jax.enable_x64(double):
                failures += _failures(alike[start : start + at_once], family, record, slack)
    assert not failures, "\n".join(failures)


def _failures(
    trials: Sequence[Trial], family: Family, record: Callable[[str, object], None] | None, slack: float
) -> list[str]:
    trials = [trial._replace(case=trial.case.with_edges_of(family)) for trial in trials]
    functions = [
        case.operator(family.fna if case.queries is None else family.fmha, **arguments)
        for case, _, _, arguments in trials
    ]
    # Trials of the same problem share its operands and what is expected.
    operands = {trial[:3]: trial.case.operands(trial.dtype, trial.seed) for trial in trials}
    cotangents = {trial[:3]: trial.case.cotangents(trial.dtype, trial.seed) for trial in trials}
    expected = {key: expected_results(*key) for key in operands}
    try:
        results = all_values_and_gradients(
            functions, [operands[trial[:3]] for trial in trials], [cotangents[trial[:3]] for trial in trials]
        )
    except Exception as error:
        if len(trials) == 1:
            return [f"{_described(trials[0])}: {type(error).__name__}: {error}"]
        # Alone, each says whether it is the one to blame.
        return [failure for trial in trials for failure in _failures([trial], family, record, slack)] or [
            f"{[_described(trial) for trial in trials]} fail in one program, but not alone: {error}"
        ]
    failures = []
    for trial, (outputs, gradients) in zip(trials, results, strict=True):
        dtype = trial.dtype
        where = _described(trial)
        assert outputs[0].dtype == dtype, where
        assert outputs[1].dtype == lse_dtype(dtype), where
        try:
            check_padding(trial.case, outputs, gradients)
            found = errors_of(expected[trial[:3]], outputs, gradients)
        except AssertionError as error:
            failures.append(f"{where}: {error}")
            continue
        if record is not None:
            record("errors", {"family": family.name, "dtype": dtype, "errors": found})
        bound = slack * BOUNDS[dtype]
        too_large = {name: error for name, error in found.items() if not error <= bound}
        if too_large:
            failures.append(f"{where}: errors {too_large} exceed {bound}")
    return failures


def check_padding(case: Case, outputs: tuple[Any, Any], gradients: oracle.Tensors) -> None:
    """Check that results of padding are exactly those of nothing.

    Raises:
        AssertionError: One is not.
    """
    if not case.is_padded:
        return
    queries, keys = ~case.real_queries(), ~case.real_keys()
    results = {
        "out": (outputs[0], queries),
        "d_query": (gradients.query, queries),
        "d_key": (gradients.key, keys),
        "d_value": (gradients.value, keys),
    }
    for name, (result, is_padding) in results.items():
        if (np.asarray(result)[is_padding] != 0).any():
            raise AssertionError(f"{name} of padding is not 0")
    if (np.asarray(outputs[1])[queries] != -np.inf).any():
        raise AssertionError("logsumexp of padding is not -inf")


def _described(trial: Trial) -> str:
    return f"{trial.case} {trial.dtype} seed {trial.seed} {dict(trial.arguments)}"
