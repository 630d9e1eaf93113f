"""Fuzzed problems, with their inputs and the way to run them. A seed and a number determine a problem."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from natten_jax import backends
from natten_jax.backends.base import Backend
from natten_jax.performance import PASSES, Pass, Performance, TilePair, tile_names
from natten_jax.plan import devices
from natten_jax.plan.devices import Device
from natten_jax.problem import Operator, Problem, problem_of
from tests.support import oracle
from tests.support.cases import as_attention, random_case
from tests.support.families import FLOAT8, Family
from tests.support.float8 import BLOCK_KINDS, HEAD_KINDS, factors_for
from tests.support.plans import plans_of
from tests.support.problems import Case

from .places import placed
from .rings import ring_pairs, with_many_keys
from .spoiled import ADDED, NAMES, TIED, Inputs, Spoiled

Ranges = tuple[tuple[int, int], ...]

_NO_BIASES: dict[str, Any] = {"relative_bias": False, "key_bias": None}

#: Head dimensions that replace the head dimension from ``random_case`` in some problems. Each is a limit of a kernel,
#: or slightly larger than a limit.
WIDE_HEADS = (64, 72, 96, 128, 136, 192, 256)
#: Maximum number of tokens of a large problem (few problems are large), and maximum number of tokens of a tile.
LARGE, LARGEST_TILE = 1600, 256
#: Maximum number of draws to find tiles whose kernels support wrapped windows.
_MAX_DRAWS = 100
#: For problems with non-finite inputs: batch sizes on CPUs, batch sizes on GPUs, and numbers of key/value heads. Some
#: batches for GPUs are so large that an SM processes several tiles in sequence.
SPOILED_BATCHES, SPOILED_BATCHES_OF_GPUS, SPOILED_HEADS = (2, 3, 5), (3, 12, 40, 96), (1, 2, 3)
#: Problems with a relative bias and at most FEW_TOKENS tokens may have many batch entries. MANY_ITEMS is the range of
#: the batch size times the number of heads. GPU CTAs that hold whole layouts then process several batch entries each.
FEW_TOKENS, MANY_ITEMS = 64, (600, 1700)
#: MANY_KEYS is the fraction of problems with large windows. BIASED_BESIDE_MANY_KEYS is the fraction of these problems
#: that keep their biases. RING_TILES is the fraction of their passes that get tiles for ring kernels, if there are any.
MANY_KEYS, BIASED_BESIDE_MANY_KEYS, RING_TILES = 0.03, 0.15, 0.85
#: Fraction of problems with a spoiled operand, among problems with a bias, sinks or a scale array.
SPOILED_BIASES = 0.15
#: Operands with a batch dimension.
PER_ENTRY_OPERANDS = ("query", "key", "value", "additional_keys", "additional_values", "key_bias")


@dataclasses.dataclass(frozen=True)
class Fuzzed:
    """A problem, its inputs, and how it is run.

    Attributes:
        family: Name of the backend family.
        case: The problem.
        dtype: Element type.
        seed: Seed of the inputs.
        query_factor: Factor by which the random normal queries and keys are multiplied.
        value_factor: Factor by which the random normal values are multiplied.
        tiles: Tiles and other options, by their names in ``Performance``.
        is_direct: True to call the backend's two passes directly, without the public operator.
        queries: For direct calls, the range of queries to compute in each dimension. ``None`` for all queries.
        keys: For direct calls, the range of keys to use in each dimension. ``None`` for all keys.
        spoiled: Non-finite or very low numbers in the inputs.
        factors: Kind of the scale factors of 8-bit arrays; ``None`` without factors.
        copies: Number of copies of the case's batch. Copies are more work for the kernels, but not for the oracle.
    """

    family: str
    case: Case
    dtype: str
    seed: int
    query_factor: float = 1.0
    value_factor: float = 1.0
    tiles: dict[str, Any] = dataclasses.field(default_factory=dict)
    is_direct: bool = False
    queries: Ranges | None = None
    keys: Ranges | None = None
    spoiled: Spoiled | None = None
    factors: str | None = None
    copies: int = 1

    @property
    def batch(self) -> int:
        return self.case.batch * self.copies

    @property
    def is_float8(self) -> bool:
        """True if the arrays are 8-bit floats. Gradients are then not computed."""
        return self.dtype in FLOAT8

    @property
    def out_dtype(self) -> str:
        """Element type of the output."""
        return "bfloat16" if self.is_float8 else self.dtype

    @property
    def operator(self) -> Operator:
        """``"fna"`` or ``"fmha"``."""
        return "fna" if self.case.queries is None else "fmha"

    @property
    def backend(self) -> str:
        """Name of the backend."""
        return f"{self.family}-{self.operator}"

    @property
    def is_reproducible(self) -> bool:
        """True if query gradients are bitwise reproducible."""
        return self.family in ("cpu", "flex") or bool(self.tiles.get("backward_deterministic", False))

    @property
    def is_merged(self) -> bool:
        """True if a separate call computes attention to the additional tokens, and the two outputs are merged."""
        return self.case.additional > 0 and not self.case.fused

    def inputs(self) -> Inputs:
        """Return the operands, and the cotangents of output and logsumexp, for all copies of the batch.

        Arrays are cropped to the queries and keys that are run.
        """
        return self._copied(self.inputs_of_case())

    def inputs_of_case(self) -> Inputs:
        """Return :meth:`inputs` for one copy of the batch.

        Spoiled numbers that the oracle cannot process are replaced by ordinary numbers.
        """
        inputs = self._drawn_inputs()
        return inputs if self.spoiled is None else self.spoiled.apply(inputs, as_drawn=self.is_compared_with_oracle)

    def spoiled_inputs(self) -> Inputs:
        """Return :meth:`inputs` with all spoiled numbers, even if the oracle cannot process them."""
        inputs = self._drawn_inputs()
        return self._copied(inputs if self.spoiled is None else self.spoiled.apply(inputs))

    @property
    def has_columns(self) -> bool:
        """True if a pass implements ``key_bias`` by columns: additional head dimensions of queries and keys."""
        if self.is_direct or self.case.key_bias is None:
            return False
        return _becomes_columns(self.backend, self.description(), Performance(**self.tiles))

    @property
    def is_compared_with_oracle(self) -> bool:
        """True if results are compared with the oracle. Otherwise, they are compared with a second run."""
        return self.spoiled is None or not self.spoiled.is_broken

    def _copied(self, inputs: Inputs) -> Inputs:
        if self.copies == 1:
            return inputs

        def copied(array: np.ndarray) -> np.ndarray:
            return np.concatenate([array] * self.copies)

        operands, (d_out, d_lse) = inputs
        given = {name: getattr(operands, name) for name in PER_ENTRY_OPERANDS}
        copies_of_operands = {name: copied(array) for name, array in given.items() if array is not None}
        return operands._replace(**copies_of_operands), (copied(d_out), copied(d_lse))

    def _drawn_inputs(self) -> Inputs:
        query, key, value, keys, values, scale, table, key_bias, sinks = self.case.host_operands(self.dtype, self.seed)
        d_out, d_lse = self.case.host_cotangents(self.dtype, self.seed)
        own, halo = _slices(self.queries), _slices(self.keys)

        def scaled(array: np.ndarray | None, factor: float) -> np.ndarray | None:
            return None if array is None else (array.astype(np.float64) * factor).astype(array.dtype)

        operands = oracle.Tensors(
            scaled(query[own], self.query_factor),
            scaled(key[halo], self.query_factor),
            scaled(value[halo], self.value_factor),
            scaled(keys, self.query_factor),
            scaled(values, self.value_factor),
            scale,
            table,
            key_bias if key_bias is None or self.keys is None else key_bias[(..., *halo[1:])],
            sinks,
        )
        return operands, (d_out[own], d_lse[own])

    def broken_rows(self) -> np.ndarray:
        """Mark the queries that a non-finite bias, sink or scale affects, bool ``[batch, *queries, heads]``."""
        assert self.spoiled is not None
        operands, _ = self.spoiled.apply(self._drawn_inputs())
        shape = operands.query.shape[:-1]
        spoiled = getattr(operands, self.spoiled.name, None)
        if not self.spoiled.is_added or spoiled is None:  # the reproducer may have removed the operand
            return np.zeros(shape, bool)
        case, mask = self.case, self.mask()
        sees = np.broadcast_to(mask.any(-1) | (case.additional > 0), (shape[0], math.prod(shape[1:-1])))
        if case.is_padded:
            sees = sees & case.real_queries().reshape(sees.shape)
        sees = sees.reshape(*shape[:-1], 1)
        if self.spoiled.name in ("scale", "sinks"):
            return np.asarray(sees & np.broadcast_to(~np.isfinite(spoiled.astype(np.float64)), shape))
        if case.is_padded:
            operands = case.padded_with(0, operands)
        with np.errstate(invalid="ignore"):
            lse = oracle.forward(operands, mask, case.actual_scale, self.entries()).lse
        return np.asarray(sees & (np.isnan(lse) | (lse == np.inf)))

    def mask(self) -> np.ndarray:
        """Return the mask ``[query tokens, key tokens]`` of the queries and keys that are run."""
        return self._cut_part(self.case.mask())

    def entries(self) -> np.ndarray | None:
        """Return the oracle's index into the relative bias for each query/key pair that is run."""
        found = self.case.entries()
        return None if found is None else self._cut_part(found)

    def _cut_part(self, pairs: np.ndarray) -> np.ndarray:
        """Crop an array ``[query tokens, key tokens]`` to the queries and keys that are run."""
        if self.queries is None or self.keys is None:
            return pairs
        own, halo = _slices(self.queries)[1:], _slices(self.keys)[1:]
        part = pairs.reshape(*self.case.layout, *self.case.layout)[own][(slice(None),) * self.case.rank + halo]
        return part.reshape(math.prod(part.shape[: self.case.rank]), -1)

    def origins(self) -> np.ndarray | None:
        """Return the coordinates of the first query and the first key that are run, int32 ``[2, 3]``."""
        if self.queries is None or self.keys is None:
            return None
        padding = [0] * (3 - self.case.rank)
        return np.asarray([padding + [begin for begin, _ in ranges] for ranges in (self.queries, self.keys)], np.int32)

    def arguments(self) -> dict[str, Any]:
        """Return options and scale factors for the public operator. Plain attention takes tile sizes, not shapes."""
        factors = {} if self.factors is None else factors_for(self.factors, self.case, self.seed)
        if self.operator == "fna":
            return {**self.tiles, **factors}
        tiles = {
            name.replace("_shape", "_size"): math.prod(value) if isinstance(value, tuple) else value
            for name, value in self.tiles.items()
        }
        return {**tiles, **factors}

    def description(self) -> Problem:
        """Return the problem in the form that backends accept.

        The returned problem has all queries and keys, even if only a part of them is run.
        """
        case = self.case
        facts: dict[str, Any] = {"batch": self.batch, "dtype": self.dtype}
        facts |= {name: getattr(case, name) for name in ("heads", "heads_kv", "head_dim", "head_dim_v", "scale")}
        if case.queries is None:
            problem = problem_of(case.layout, **case.window_arguments, additional_kv=case.additional, **facts)
        else:
            causal = case.causal[0]
            problem = problem_of((case.queries,), is_causal=causal, operator="fmha", kv_layout=case.layout, **facts)
        return dataclasses.replace(
            problem, relative_bias=case.relative_bias, key_bias=case.key_bias is not None, own_extents=case.is_padded
        )


def draw(family: Family, operators: tuple[str, ...], seed: int, number: int, is_direct: bool) -> Fuzzed:
    """Draw problem ``number`` of the sequence that a seed determines."""
    found = draw_where(family, operators, seed, number, is_direct, lambda problem: True)
    assert found is not None
    return found


def draw_where(
    family: Family,
    operators: tuple[str, ...],
    seed: int,
    number: int,
    is_direct: bool,
    is_wanted: Callable[[Fuzzed], bool],
    share_of_many_keys: float = MANY_KEYS,
    share_of_spoiled_biases: float = SPOILED_BIASES,
) -> Fuzzed | None:
    """Draw a problem and return it if ``is_wanted`` accepts it, otherwise ``None``.

    ``is_wanted`` gets the problem without tiles: they are drawn afterwards, because this takes the most time.
    """
    rng = np.random.default_rng([seed, number])
    case = random_case(int(rng.integers(2**31)), tokens=LARGE if rng.random() < 0.08 else None)
    if rng.random() < 0.3:
        case = dataclasses.replace(case, head_dim=int(rng.choice(WIDE_HEADS)), batch=1)
        if rng.random() < 0.5:
            case = dataclasses.replace(case, head_dim_v=int(rng.choice(WIDE_HEADS)))
    if math.prod(case.layout) > 480:
        case = dataclasses.replace(case.with_heads(case.heads // case.heads_kv, 1), batch=1)
    if rng.choice(operators) == "fmha":
        case = as_attention(rng, case, int(rng.choice([20, 150, 400])))
    copies, rng_many_keys = 1, np.random.default_rng([seed, number, 4])
    has_many_keys = family.needs_gpu and case.queries is None and rng_many_keys.random() < share_of_many_keys
    if has_many_keys:
        case, copies = with_many_keys(rng_many_keys, case)
    case = case.with_edges_of(family)
    case = _with_logit_terms(np.random.default_rng([seed, number, 1]), case, family)
    if has_many_keys and rng_many_keys.random() > BIASED_BESIDE_MANY_KEYS:
        case = dataclasses.replace(case, **_NO_BIASES)
    if is_direct and "sinks" not in family.capabilities.features:  # operators apply sinks if kernels do not
        case = dataclasses.replace(case, sinks=False)
    if is_direct and case.additional:
        case = dataclasses.replace(case, fused=True)
    case = _with_many_entries(np.random.default_rng([seed, number, 3]), case, family)
    spoiled = None
    if rng.random() < 0.2:
        case, spoiled = _spoiled(rng, _without_logit_terms(case), family.needs_gpu)
        copies = 1
    problem = Fuzzed(
        family=family.name,
        case=(case.fitted(family) if is_direct else case).with_edges_of(family),  # operators pad head dimensions
        dtype=str(rng.choice(family.dtypes)),
        seed=int(rng.integers(2**31)),
        query_factor=_factor(rng),
        value_factor=_factor(rng),
        is_direct=is_direct,
        spoiled=spoiled,
        copies=copies,
    )
    if has_many_keys:
        half_dtypes = [dtype for dtype in family.dtypes if dtype in ("float16", "bfloat16")]
        problem = dataclasses.replace(problem, dtype=str(rng_many_keys.choice(half_dtypes)))
    problem = with_supported_terms(problem, family)
    if not is_direct and spoiled is None and rng.random() < 0.4:
        problem = dataclasses.replace(problem, case=placed(rng, problem.case, family), copies=1)
    # A problem with a wrapped dimension is not cropped: its first queries may see the last keys of the dimension.
    can_be_part = case.queries is None and "wrap" not in (case.edges or ())
    if is_direct and can_be_part and rng.random() < 0.25:
        query_ranges, key_ranges = (tuple(_range(rng, extent) for extent in case.layout) for _ in range(2))
        problem = dataclasses.replace(problem, queries=query_ranges, keys=key_ranges)
    if not is_direct and spoiled is None and family.float8_dtypes:
        problem = _as_float8(np.random.default_rng([seed, number, 2]), problem, family)
    if spoiled is None:
        problem = _with_spoiled_bias(np.random.default_rng([seed, number, 5]), problem, share_of_spoiled_biases)
    if not is_wanted(problem):
        return None
    found = with_tiles(problem, rng)
    if found is None:
        found = with_tiles(dataclasses.replace(problem, case=problem.case.with_edges_of(family, is_direct=True)), rng)
        assert found is not None
    return found


def _with_spoiled_bias(rng: np.random.Generator, problem: Fuzzed, share: float) -> Fuzzed:
    """With probability ``share``, spoil numbers of one bias, of the sinks or of the scale, if the problem has any."""
    case = problem.case
    are_there = case.relative_bias, case.key_bias is not None, case.sinks, case.scales is not None
    names = [name for name, is_there in zip(ADDED, are_there, strict=True) if is_there]
    if problem.is_float8 or not names or rng.random() > share:
        return problem
    spoiled = Spoiled.draw(rng, names)
    if problem.is_direct and spoiled.name == "sinks":  # direct calls need float32 sinks
        spoiled = dataclasses.replace(spoiled, is_narrow=False)
    if spoiled.number in TIED:
        # With such biases, all logits are equal if each query/key product is smaller than half a unit in the last
        # place of the bias. This requires the default scale, and no large factor of queries and keys.
        case = dataclasses.replace(case, scale=None, scales=None)
        problem = dataclasses.replace(problem, case=case, query_factor=min(problem.query_factor, 1.0))
    return dataclasses.replace(problem, copies=1, spoiled=spoiled)


def _as_float8(rng: np.random.Generator, problem: Fuzzed, family: Family) -> Fuzzed:
    """Convert some problems to 8-bit arrays, with or without scale factors."""
    if rng.random() > 0.2 or problem.copies > 1 or (family.rounds_weights and problem.case.key_bias is not None):
        return problem
    has_blocks = problem.case.additional == 0 and not family.rounds_weights
    kinds = [None, *HEAD_KINDS, *BLOCK_KINDS * has_blocks]
    dtype = str(rng.choice(family.float8_dtypes))
    found = dataclasses.replace(problem, dtype=dtype, factors=kinds[int(rng.integers(len(kinds)))])
    backend = backends.find(problem.backend, problem.operator)
    is_taken = backend.rejection(found.description(), devices.default_device(), "forward") is None
    return found if is_taken else problem


def _with_logit_terms(rng: np.random.Generator, case: Case, family: Family) -> Case:
    """Add sinks to some problems, and biases if the family supports them."""
    biases = family.capabilities.features
    return dataclasses.replace(
        case,
        relative_bias=bool(rng.random() < 0.4) and case.queries is None and "relative_bias" in biases,
        key_bias=str(rng.choice(["tokens", "heads"])) if rng.random() < 0.3 and "key_bias" in biases else None,
        hidden=float(rng.choice([0.0, 0.2, 0.8])),
        sinks=bool(rng.random() < 0.2),
    )


def _with_many_entries(rng: np.random.Generator, case: Case, family: Family) -> Case:
    """Give some small problems with a relative bias so many batch entries that a GPU CTA processes several of them."""
    if not (family.needs_gpu and case.relative_bias and math.prod(case.layout) <= FEW_TOKENS) or rng.random() > 0.3:
        return case
    case = case.with_heads(case.heads, case.heads)
    return dataclasses.replace(case, batch=int(rng.integers(*MANY_ITEMS)) // case.heads)


def with_supported_terms(problem: Fuzzed, family: Family) -> Fuzzed:
    """Remove the biases that the backend does not support. For direct calls, also remove a key bias in columns."""
    backend, case, device = backends.find(problem.backend, problem.operator), problem.case, devices.default_device()
    without: tuple[dict[str, Any], ...] = {}, {"relative_bias": False}, {"key_bias": None}, _NO_BIASES
    for changes in without:
        changed = dataclasses.replace(problem, case=dataclasses.replace(case, **changes))
        described = changed.description()
        if not described.biases:
            return changed
        if any(backend.rejection(described, device, pass_) is not None for pass_ in PASSES):
            continue
        if not (
            problem.is_direct and described.key_bias and _becomes_columns(problem.backend, described, Performance())
        ):
            return changed
    raise AssertionError


def _becomes_columns(name: str, problem: Problem, performance: Performance) -> bool:
    """Return True if a pass implements ``key_bias`` by columns: additional head dimensions of queries and keys."""
    backend, device = backends.find(name, problem.operator), devices.default_device()
    return not all(backend.widened(problem, device, each, performance.tiles(each)).key_bias for each in PASSES)


def _without_logit_terms(case: Case) -> Case:
    return dataclasses.replace(case, **_NO_BIASES, sinks=False)


def _spoiled(rng: np.random.Generator, case: Case, needs_gpu: bool) -> tuple[Case, Spoiled]:
    """Return the problem with several batch entries, and non-finite numbers for one of them.

    The oracle does not run such a problem.
    """
    heads_kv = int(rng.choice(SPOILED_HEADS))
    batch = int(rng.choice(SPOILED_BATCHES_OF_GPUS if needs_gpu else SPOILED_BATCHES))
    case = dataclasses.replace(case.with_heads(heads_kv * int(rng.integers(1, 3)), heads_kv), batch=batch)
    if rng.random() < 0.5:
        head_dim, head_dim_v = (int(n) for n in rng.choice((8, 32, *WIDE_HEADS), 2))
        case = dataclasses.replace(case, head_dim=head_dim, head_dim_v=head_dim_v)
    return case, Spoiled.draw(rng, [name for name in NAMES if case.additional or not name.startswith("additional")])


def variants(problem: Fuzzed, count: int) -> list[Fuzzed]:
    """Return ``count`` problems: this problem, and variants of it with other random tiles and options."""
    found = (with_tiles(problem, np.random.default_rng([problem.seed, i])) for i in range(1, count))
    return [problem, *(each or problem for each in found)]


def with_tiles(problem: Fuzzed, rng: np.random.Generator) -> Fuzzed | None:
    """Draw tiles and options for a problem.

    In direct calls, only some tiles support wrapped dimensions. If the problem needs such tiles and no draw has them,
    return ``None``.
    """
    if not _goes_around_directly(problem):
        return _with_any_tiles(problem, rng)
    found = (_with_any_tiles(problem, rng) for _ in range(_MAX_DRAWS))
    return next(filter(_is_known_to_kernels, found), None)


def _goes_around_directly(problem: Fuzzed) -> bool:
    return problem.is_direct and "wrap" in (problem.case.edges or ())


def _is_known_to_kernels(problem: Fuzzed) -> bool:
    """Return True if the kernels that the problem's tiles select support wrapped windows in both passes."""
    backend, plans = plans_of(problem.backend, problem.description(), Performance(**problem.tiles))
    return all(backend.form(plan).wraps for plan in plans.values())


def _with_any_tiles(problem: Fuzzed, rng: np.random.Generator) -> Fuzzed:
    backend = backends.find(problem.backend, problem.operator)
    rank = problem.case.rank
    tiles: dict[str, Any] = {
        "backward_kv_splits": tuple(rng.integers(1, 5, rank).tolist()) if rng.random() < 0.3 else None,
        "backward_use_xla_reduction": bool(rng.random() < 0.3),
        "backward_deterministic": bool(rng.random() < 0.4),
        "memory_usage_preference": str(rng.choice(["strict", "default", "unrestricted"])),
        "run_persistent_kernel": bool(rng.random() < 0.6),
        "kernel_schedule": [None, "non", "coop", "pp"][int(rng.integers(4))],
    }
    for pass_ in PASSES[:1] if problem.is_float8 else PASSES:
        pair = _tile_pair(problem, backend, pass_, rng)
        if pair is not None:
            tiles |= dict(zip(tile_names(pass_), pair, strict=True))
    defaults = vars(Performance())
    return dataclasses.replace(problem, tiles={n: value for n, value in tiles.items() if value != defaults[n]})


def _tile_pair(problem: Fuzzed, backend: Backend, pass_: Pass, rng: np.random.Generator) -> Any:
    """Draw tiles for a pass: tiles that the backend lists, any tiles that it accepts, or ``None`` for the default."""
    device, described = devices.default_device(), problem.description()

    def planned(pair: TilePair | None = None) -> Problem:
        # An operator adapts the problem to the kernels that the tiles select. For example, it adds columns for a key
        # bias. A direct call does not adapt the problem.
        return described if problem.is_direct else backend.widened(described, device, pass_, pair)

    if problem.copies > 1 and rng.random() < RING_TILES:
        by_kernels = list(ring_pairs(backend, described, device, pass_).values())
        if by_kernels:
            kernel_tiles = by_kernels[int(rng.integers(len(by_kernels)))]
            return kernel_tiles[int(rng.integers(len(kernel_tiles)))]
    # Most draws do not use the backend's list of tiles, because the backend ranks this list, which is slow.
    kind = str(rng.choice(["none", "listed", "any"], p=[0.1, 0.3, 0.6]))
    # If a layout has few tokens, few tiles support wrapped windows. Random tiles would seldom support them.
    if _goes_around_directly(problem):
        kind = "listed"
    if kind == "none":
        return None
    if kind == "any":
        for _ in range(20):
            pair = _tile(rng, described.rank), _tile(rng, described.rank)
            if backend.offers(planned(pair), device, pass_, pair):
                return pair
    by_size = _pairs_by_size(backend, planned(), device, pass_)
    if not by_size:
        return None
    listed = by_size[int(rng.integers(len(by_size)))]
    return listed[int(rng.integers(len(listed)))]


@functools.lru_cache(maxsize=16)
def _pairs_by_size(backend: Backend, problem: Problem, device: Device, pass_: Pass) -> list[list[TilePair]]:
    """Group the tiles that a backend lists by the token counts of the query tile and of the key/value tile.

    The token counts select the kernel.

    Callers draw a group first, so that all sizes are equally likely. The result is cached: a backend may list thousands
    of tiles, and tiles may be drawn many times for a problem.
    """
    by_size: dict[tuple[int, ...], list[TilePair]] = {}
    for pair in backend.tile_pairs(problem, device, pass_):
        by_size.setdefault(tuple(map(math.prod, pair)), []).append(pair)
    return list(by_size.values())


def _tile(rng: np.random.Generator, rank: int) -> tuple[int, ...]:
    """Draw a tile of any shape. Its maximum number of tokens is drawn from sizes that kernels are compiled for."""
    left = int(rng.choice([16, 32, 64, 96, 128, 192, LARGEST_TILE]))
    tile = [1] * rank
    order = rng.permutation(rank)
    for dimension in order[:-1]:
        tile[dimension] = int(rng.choice([1, 2, 4, 8, 16, int(rng.integers(1, left + 1))]))
        tile[dimension] = min(tile[dimension], left)
        left //= tile[dimension]
    tile[order[-1]] = left if rng.random() < 0.6 else int(rng.integers(1, left + 1))
    return tuple(tile)


def _factor(rng: np.random.Generator) -> float:
    return 1.0 if rng.random() < 0.6 else float(10 ** rng.uniform(-3, math.log10(30)))


def _range(rng: np.random.Generator, extent: int) -> tuple[int, int]:
    begin, end = sorted(int(n) for n in rng.choice(extent + 1, 2, replace=False))
    return begin, end


def _slices(ranges: Ranges | None) -> tuple[Any, ...]:
    return (...,) if ranges is None else (slice(None), *(slice(*ends) for ends in ranges))
