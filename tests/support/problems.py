"""Run test problems, and compare their results with the oracle's."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from tests.support import oracle
from tests.support.case import OPERATORS as OPERATORS  # re-exported
from tests.support.case import Case as Case
from tests.support.case import Shape as Shape
from tests.support.case import element_types as element_types
from tests.support.case import lse_dtype as lse_dtype
from tests.support.compilation import QUICK_HOST_OPTIONS, accepted_options, as_users_do
from tests.support.families import BOUNDS, Family

#: The norm of an error is divided by the larger of two numbers: the norm of the result, and this fraction of the norm
#: of the result's magnitude (the sum of the magnitudes of its terms). The fraction matters for results whose terms
#: cancel. For example, some gradients are exactly 0 if the scale is 0, and almost 0 for windows of one or two keys,
#: because the softmax is nearly constant. With the float32 bound of 2e-6, the allowed error is then 1e-7 of the
#: magnitude, which is less than two rounding errors of a term.
CANCELLATION = 0.05

#: Most compiled problems run once, for microseconds. Optimizing their CPU code, or autotuning their matrix products on
#: a GPU, would take most of the test suite's time.
QUICK_COMPILATION = accepted_options(
    QUICK_HOST_OPTIONS
    if jax.default_backend() == "cpu"
    else {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
)

#: ``jax.jit`` with fast compilation.
quick = functools.partial(jax.jit, compiler_options=QUICK_COMPILATION)

#: Operands that have the element type of the logsumexp, not that of query, key and value.
LOGIT_OPERANDS = ("scale", "relative_bias", "key_bias", "sinks")


def relative_error(result: Any, reference: np.ndarray, magnitude: np.ndarray) -> float:
    """Return the error norm relative to the larger of ``||reference||`` and ``CANCELLATION * ||magnitude||``."""
    result = np.asarray(result).astype(np.float64)
    if result.shape != reference.shape:
        raise AssertionError(f"shape {result.shape} instead of {reference.shape}")
    is_empty = reference == -np.inf  # the logsumexp of queries without keys
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


def both_passes(function: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a function that maps operands and cotangents to outputs and gradients."""

    def run(operands: Any, cotangents: Any) -> Any:
        outputs, pullback = jax.vjp(function, operands)
        return outputs, pullback(cotangents)[0]

    return run


def value_and_gradients(
    function: Callable[[oracle.Tensors], tuple[Any, Any]], operands: oracle.Tensors, cotangents: tuple[Any, Any]
) -> Results:
    """Run both passes of a function in one compiled program."""
    return all_values_and_gradients([function], [operands], [cotangents])[0]


def all_values_and_gradients(
    functions: Sequence[Callable[[oracle.Tensors], tuple[Any, Any]]],
    operands: Sequence[oracle.Tensors],
    cotangents: Sequence[tuple[Any, Any]],
) -> list[Results]:
    """Run both passes of several functions in one compiled program, to share the fixed cost of compilation."""

    @functools.partial(jax.jit, compiler_options=QUICK_COMPILATION)
    def run(operands: Sequence[oracle.Tensors], cotangents: Sequence[tuple[Any, Any]]) -> Any:
        return [
            both_passes(function)(own, cotangent)
            for function, own, cotangent in zip(functions, operands, cotangents, strict=True)
        ]

    return run(operands, cotangents)


def errors(case: Case, outputs: tuple[Any, Any], gradients: oracle.Tensors | None, seed: int) -> dict[str, float]:
    """Return the relative error of each result of ``case`` by name. The inputs were drawn from ``seed``."""
    return errors_of(expected_results(case, outputs[0].dtype.name, seed), outputs, gradients)


@functools.lru_cache(maxsize=128)
def expected_results(case: Case, dtype: str, seed: int) -> oracle.Reference:
    """Return the oracle's results for inputs drawn from ``seed``. They are cached, because all backends need them."""
    return expected_of(case, case.host_operands(dtype, seed), case.host_cotangents(dtype, seed))


def expected_of(case: Case, operands: oracle.Tensors, cotangents: tuple[Any, Any]) -> oracle.Reference:
    """Return the oracle's results of ``case`` for the given inputs."""
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
    """Return the relative error of each result by name."""
    found = dict(zip(("out", "lse"), outputs, strict=True))
    pairs = {name: (getattr(expected.forward, name), getattr(expected.forward_magnitude, name)) for name in found}
    if gradients is not None:
        for name, gradient in gradients._asdict().items():
            reference = getattr(expected.gradients, name)
            assert (gradient is None) == (reference is None), name
            if gradient is not None:
                assert gradient.dtype == outputs[name in LOGIT_OPERANDS].dtype, name
                found[f"d_{name}"] = gradient
                pairs[f"d_{name}"] = reference, getattr(expected.gradient_magnitude, name)
    return {name: relative_error(found[name], *pairs[name]) for name in found}


def check(case: Case, family: Family, dtype: str, seed: int = 0, **arguments: Any) -> None:
    """Compare both passes of a backend with the oracle.

    Args:
        case: The problem.
        family: The family whose backend runs it.
        dtype: Element type of the operands.
        seed: Seed of the random operands.
        **arguments: Additional arguments of the operator, tile shapes for example.
    """
    check_all([Trial(case, dtype, seed, arguments)], family)


class Trial(NamedTuple):
    """A problem to compare with the oracle.

    Attributes:
        case: The problem.
        dtype: Element type of the operands.
        seed: Seed of the random operands.
        arguments: Additional arguments of the operator, tile shapes for example.
    """

    case: Case
    dtype: str
    seed: int = 0
    arguments: Mapping[str, Any] = MappingProxyType({})


def check_all(trials: Sequence[Trial], family: Family, at_once: int | None = None, slack: float = 1.0) -> None:
    """Compare both passes of a backend with the oracle for several problems, batched into compiled programs.

    Args:
        trials: The problems.
        family: The family whose backend runs them.
        at_once: Number of trials per program. Default: the family's ``at_once``.
        slack: Factor that multiplies the error bounds.

    Raises:
        AssertionError: Results are wrong. The message lists every problem with wrong results.
    """
    failures = []
    for double in (False, True):
        alike = [trial for trial in trials if (trial.dtype == "float64") == double]
        size = at_once or family.at_once
        for start in range(0, len(alike), size):
            with jax.enable_x64(double):
                failures += _failures(alike[start : start + size], family, slack)
    assert not failures, "\n".join(failures)


def _failures(trials: Sequence[Trial], family: Family, slack: float) -> list[str]:
    trials = [trial._replace(case=trial.case.with_edges_of(family)) for trial in trials]
    functions = [
        case.operator(family.fna if case.queries is None else family.fmha, **arguments)
        for case, _, _, arguments in trials
    ]
    # Trials of the same problem share its operands and expected results.
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
        # Run each trial separately to find the failing trials.
        return [failure for trial in trials for failure in _failures([trial], family, slack)] or [
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
        bound = slack * BOUNDS[dtype]
        too_large = {name: error for name, error in found.items() if not error <= bound}
        if too_large:
            failures.append(f"{where}: errors {too_large} exceed {bound}")
    return failures


def check_gradients_repeat(
    case: Case, backend: str, names: Sequence[str] = oracle.Tensors._fields, dtype: str = "bfloat16", **arguments: Any
) -> None:
    """Check that gradients of 21 runs are bitwise equal."""
    operands, cotangents = case.operands(dtype, 0), case.cotangents(dtype, 0)

    @functools.partial(jax.jit, compiler_options=as_users_do())
    def gradients(operands: oracle.Tensors) -> dict[str, jax.Array]:
        found = both_passes(case.operator(backend, **arguments))(operands, cotangents)[1]._asdict()
        return {name: found[name] for name in names if found[name] is not None}

    first = jax.tree.map(np.asarray, gradients(operands))
    assert all((array != 0).any() for array in first.values())
    for _ in range(20):
        jax.tree.map(np.testing.assert_array_equal, gradients(operands), first)


def check_padding(case: Case, outputs: tuple[Any, Any], gradients: oracle.Tensors) -> None:
    """Check that outputs and gradients of padding tokens are exactly 0, and their logsumexps exactly -inf.

    Raises:
        AssertionError: A result of padding tokens has another value.
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
