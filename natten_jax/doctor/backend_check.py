"""Check a backend on this device: ``python -m natten_jax.doctor --check NAME``.

The check compares the backend's results with attention in float64, and measures the backend's times. Run it on devices
that the authors of the backend could not test. Users can send the output as a bug report or as a measurement.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from natten_jax import backends
from natten_jax.backends import select
from natten_jax.backends.base import Backend
from natten_jax.element_types import SUPPORTED_DTYPES
from natten_jax.ops.attention import attention
from natten_jax.ops.neighborhood import na1d, na2d, na3d
from natten_jax.performance import PASSES, Pass
from natten_jax.plan.devices import Device, default_device, default_jax_device
from natten_jax.plan.plan import BackendId, Request
from natten_jax.plot import axis_mask
from natten_jax.problem import OPERATORS, Operator, Problem, problem_of
from natten_jax.profiler.measure import shapes_of
from natten_jax.version import __version__

#: Largest allowed error ``||result - reference|| / ||reference||``, by element type. Wrong results have much larger
#: errors: one extra key in a window of 100 keys gives an error of 0.1. The bound for 8-bit arrays is the largest,
#: because their kernels round the softmax weights to three mantissa bits.
BOUNDS = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 2e-5, "float64": 1e-12, "float8_e4m3fn": 5e-2}
#: Number of runs per problem. A race condition may change the results of only a few runs.
RUNS = 3
#: A measurement repeats a call until the calls have taken ``_TIMED_SECONDS``, and returns the median time.
#: ``_TIMED_CALLS`` are the smallest and the largest number of calls.
_TIMED_SECONDS, _TIMED_CALLS = 0.3, (3, 50)
#: Number of heads in the timed problems: ``_HEADS`` on accelerators, ``_HEADS_OF_HOST`` on the host.
_HEADS, _HEADS_OF_HOST = 16, 1

_OPERATORS: Mapping[int, Callable[..., Any]] = {1: na1d, 2: na2d, 3: na3d}

# The results of these small problems, which have different window arguments and head dimensions, are compared with the
# reference. The larger problems below are timed.
_NEIGHBORHOOD = (
    problem_of((301,), 64, heads=2),
    problem_of((300,), 96, 8, is_causal=True, heads=4, heads_kv=2, head_dim=128),
    problem_of((257,), 13, dilation=9, heads=1, head_dim=32),
    problem_of((28, 30), 7, batch=2, heads=2, head_dim=32),
    problem_of((25, 31), (9, 13), (4, 1), heads=2, head_dim=80),
    problem_of((26, 33), (5, 7), 1, (5, 4), heads=2, additional_kv=11),
    problem_of((8, 11, 13), (3, 5, 7), is_causal=(True, False, False), heads=2),
    problem_of((6, 12, 16), (4, 6, 8), (2, 3, 4), heads=2, head_dim=128),
    problem_of((20, 20), (11, 12), heads=1, head_dim=256, head_dim_v=64),
)
#: A problem with 210 keys per window and a large batch. For such problems, the kernels for small windows use a ring
#: buffer.
_NEIGHBORHOOD_OF_GPUS = (problem_of((11, 7, 13), (7, 6, 5), batch=64, heads=1),)
_ATTENTION = (
    problem_of((333,), operator="fmha", heads=2),
    problem_of((300,), operator="fmha", is_causal=True, heads=4, heads_kv=1, head_dim=128),
    problem_of((150,), operator="fmha", kv_layout=(77,), batch=2, heads=2, head_dim=32),
    problem_of((64,), operator="fmha", kv_layout=(400,), heads=1, head_dim=256, head_dim_v=80),
)
_TIMED_NEIGHBORHOOD = (
    problem_of((112, 112), 7, head_dim=32),
    problem_of((64, 64), 25),
    problem_of((8192,), 1024, is_causal=True, head_dim=128),
    problem_of((8, 24, 40), (4, 12, 12), head_dim=128),
)
_TIMED_ATTENTION = (
    problem_of((4096,), operator="fmha", head_dim=128),
    problem_of((4096,), operator="fmha", is_causal=True),
)


def problems(operator: Operator, dtypes: tuple[str, ...], *, is_gpu: bool = False) -> Iterator[Problem]:
    """Yield the problems whose results are compared with the reference.

    The first element type is used for all problems, and each further element type for a third of the problems.

    Args:
        operator: ``"fna"`` or ``"fmha"``.
        dtypes: Element types of the backend, the most common types first.
        is_gpu: True to include the problems that would take too long on a host.
    """
    every = _NEIGHBORHOOD + _NEIGHBORHOOD_OF_GPUS * is_gpu if operator == "fna" else _ATTENTION
    for number, dtype in enumerate(dtypes):
        for problem in every if number == 0 else every[number % 3 :: 3]:
            yield dataclasses.replace(problem, dtype=dtype)


#: Largest number of batch entries with different values. All further batch entries repeat these values.
_MAX_DIFFERENT = 2


def arrays_of(problem: Problem) -> dict[str, np.ndarray]:
    """Return normally distributed operands and cotangents of a problem, by name. All calls return the same values."""
    few = dataclasses.replace(problem, batch=min(problem.batch, _MAX_DIFFERENT))
    rng, dtype = np.random.default_rng(0), jnp.dtype(problem.dtype)
    arrays = {name: rng.standard_normal(shape, np.float32).astype(dtype) for name, shape in shapes_of(few).items()}
    arrays["logsumexp_cotangent"] = rng.standard_normal(arrays["query"].shape[:-1], np.float32)
    return {name: np.resize(array, (problem.batch, *array.shape[1:])) for name, array in arrays.items()}


def operands_of(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return only the operands of :func:`arrays_of`, without the cotangents."""
    return {name: array for name, array in arrays.items() if not name.endswith("cotangent")}


def reference(problem: Problem, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Compute output, logsumexp and the gradients of all operands in float64 on the host; return them by name.

    Args:
        problem: A problem without biases.
        arrays: Operands and cotangents of the problem, in any element type.
    """
    mask = functools.reduce(np.kron, map(axis_mask, problem.axes))
    mask = np.pad(mask, [(0, 0), (0, problem.additional_kv)], constant_values=True)
    inputs = {name: array.astype(np.float64) for name, array in arrays.items()}
    group = problem.heads // problem.heads_kv

    def tokens(*names: str) -> np.ndarray:
        """Concatenate the named arrays along tokens: return ``[batch, heads, tokens, width]``."""
        parts = [inputs[name] for name in names if name in inputs]
        flat = [part.reshape(problem.batch, -1, *part.shape[-2:]) for part in parts]
        return np.concatenate(flat, axis=1).swapaxes(1, 2)

    keys, values = (np.repeat(tokens(name, f"additional_{name}s"), group, axis=1) for name in ("key", "value"))
    query, out_cotangent = tokens("query"), tokens("out_cotangent")
    logits = np.where(mask, problem.scale * query @ keys.swapaxes(2, 3), -np.inf)
    lse = np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    weights = np.exp(logits - lse)
    out = weights @ values
    lse_cotangent = inputs["logsumexp_cotangent"].reshape(problem.batch, -1, problem.heads, 1).swapaxes(1, 2)
    delta = (out_cotangent * out).sum(axis=-1, keepdims=True) - lse_cotangent
    d_logits = problem.scale * weights * (out_cotangent @ values.swapaxes(2, 3) - delta)
    results = {"out": out, "lse": lse, "d_query": d_logits @ keys}
    gradients = {"key": d_logits.swapaxes(2, 3) @ query, "value": weights.swapaxes(2, 3) @ out_cotangent}
    for name, per_query_head in gradients.items():
        # The gradient of a key/value head is the sum over the query heads that share it.
        gradient = per_query_head.reshape(problem.batch, problem.heads_kv, group, *per_query_head.shape[2:]).sum(axis=2)
        local = gradient.shape[2] - problem.additional_kv
        results[f"d_{name}"], results[f"d_additional_{name}s"] = np.split(gradient, [local], axis=2)
    shapes = {"out": inputs["out_cotangent"].shape, "lse": inputs["logsumexp_cotangent"].shape}
    shapes |= {f"d_{name}": array.shape for name, array in operands_of(inputs).items()}
    return {name: results[name].swapaxes(1, 2).reshape(shape) for name, shape in shapes.items()}


def id_of(name: str) -> BackendId:
    """Return the identifier of the backend with this name.

    Raises:
        ValueError: No backend has this name. The message lists all names.
    """
    operator = next((each for each in OPERATORS if name.endswith(each)), OPERATORS[0])
    return BackendId(backends.find(name, operator).family, operator)


def check(id_: BackendId) -> int:
    """Check a backend and print the outcome.

    Returns:
        The exit status: 0 if every result is correct; 1 if a result is wrong or the backend cannot run on the device.
    """
    session = _Session(id_, backends.by_id(id_), default_device())
    if reason := session.cannot_run():
        print(f"{id_} cannot be checked here: {reason}", file=sys.stderr)
        return 1
    for line in session.lines():
        print(line, flush=True)
    return 1 if session.wrong or not session.compared else 0


@dataclasses.dataclass
class _Session:
    """A check of a backend.

    Attributes:
        id_: The backend's identifier.
        backend: The backend.
        device: The device.
        compared: Number of problems whose results were compared so far.
        wrong: Number of problems with wrong results so far.
    """

    id_: BackendId
    backend: Backend
    device: Device
    compared: int = 0
    wrong: int = 0

    @functools.cached_property
    def default(self) -> BackendId:
        return select.resolve(Request(next(self._problems())), self.device, "forward").backend

    @property
    def baseline(self) -> BackendId | None:
        """Backend to compare times with: the default, or plain JAX if the checked backend is the default.

        ``None`` if plain JAX is both the default and the checked backend.
        """
        plain = BackendId(backends.registered()[-1].family, self.id_.operator)
        return next((each for each in (self.default, plain) if each != self.id_), None)

    def cannot_run(self) -> str | None:
        """Return the reason if the backend can run none of the problems on the device; otherwise ``None``."""
        reasons = [self._rejection(problem) for problem in self._problems()]
        return None if None in reasons else reasons[0]

    def lines(self) -> Iterator[str]:
        """Run the check, and yield the lines of its output."""
        yield f"natten_jax {__version__}, jax {jax.__version__}, {default_jax_device().device_kind} ({self.device})"
        yield f"{self.id_}: errors relative to attention in float64, the largest of {RUNS} runs"
        for problem in self._problems():
            yield f"{_label(problem)}: {self._comparison(problem)}"
        yield f"{self.id_}: times of a call in milliseconds{f', and of {self.baseline}' if self.baseline else ''}"
        heads = _HEADS_OF_HOST if self.device.platform == "cpu" else _HEADS
        for timed in _TIMED_NEIGHBORHOOD if self.id_.operator == "fna" else _TIMED_ATTENTION:
            problem = dataclasses.replace(timed, dtype=self._dtypes()[0], heads=heads, heads_kv=heads)
            yield f"{_label(problem)}: {self._times(problem)}"
        yield f"{self.compared - self.wrong} of {self.compared} problems are correct"
        yield from self._advice()

    def _comparison(self, problem: Problem) -> str:
        """Compare the results of a problem with the reference, and describe the outcome."""
        if reason := self._rejection(problem):
            return f"skipped: {reason}"
        self.compared += 1
        no_gradients = self._rejection(problem, "backward")
        try:
            errors = relative_errors(problem, str(self.id_), with_gradients=no_gradients is None)
        except Exception as error:  # JAX, the compiler and the device raise errors of many types
            self.wrong += 1
            return _failure(error, 2000)
        is_right = max(errors.values()) <= BOUNDS[problem.dtype]  # False if a result is not finite: its error is inf
        self.wrong += not is_right
        figures = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
        gradients = f"; gradients are skipped: {no_gradients}" if no_gradients else ""
        return f"{'right' if is_right else 'WRONG'}: {figures}{gradients}"

    def _times(self, problem: Problem) -> str:
        """Measure the time of each pass of a problem, and return the times as text."""
        if reason := self._rejection(problem):
            return f"skipped: {reason}"
        return "; ".join(self._time(problem, pass_) for pass_ in PASSES if self._rejection(problem, pass_) is None)

    def _time(self, problem: Problem, pass_: Pass) -> str:
        seconds, baseline = _milliseconds(problem, str(self.id_), pass_), self.baseline
        text = f"{'forward' if pass_ == 'forward' else 'with gradients'} {_shown(seconds)}"
        if baseline is None or isinstance(seconds, str):
            return text
        other = _milliseconds(problem, str(baseline), pass_)
        ratio = "" if isinstance(other, str) else f", {other / seconds:.2f} times as fast"
        return f"{text} ({baseline} {_shown(other)}{ratio})"

    def _advice(self) -> Iterator[str]:
        """Yield the last lines of the output, which recommend what to do next."""
        if self.wrong:
            yield f"Do not use {self.id_} on this device. Please report the output above."
            return
        is_by_name_only = self.backend.capabilities.is_by_name_only
        if self.default == self.id_:
            yield f"{self.id_} runs here by default."
        elif is_by_name_only:
            setting = f"{select.VARIABLE}={self.backend.family}"
            yield f'backend="{self.id_}" runs it, and {setting} in the environment makes it the default.'
        else:
            yield f'backend="{self.id_}" runs it; calls without a name run {self.baseline}.'
        if is_by_name_only:
            yield "No measurement of it has been reported yet. Please report the output above, including the times."

    def _dtypes(self) -> tuple[str, ...]:
        order = ["bfloat16", "float16", "float32", *SUPPORTED_DTYPES]  # the most common types first
        return tuple(sorted(self.backend.capabilities.dtypes, key=order.index))

    def _problems(self) -> Iterator[Problem]:
        dtypes = *self._dtypes(), *self.backend.capabilities.float8_dtypes
        return problems(self.id_.operator, dtypes, is_gpu=self.device.platform == "cuda")

    def _rejection(self, problem: Problem, pass_: Pass = "forward") -> str | None:
        return self.backend.rejection(problem, self.device, pass_)


def relative_errors(problem: Problem, backend: str, *, with_gradients: bool) -> dict[str, float]:
    """Return the error of each result by name: the maximum over all runs, relative to the norm of the reference."""
    arrays = arrays_of(problem)
    few = dataclasses.replace(problem, batch=min(problem.batch, _MAX_DIFFERENT))
    expected = reference(few, {name: array[: few.batch] for name, array in arrays.items()})
    with jax.enable_x64(problem.dtype == "float64"):
        run, arguments = _program(problem, backend, arrays, with_gradients)
        results = [{name: np.asarray(each, np.float64) for name, each in run(*arguments).items()} for _ in range(RUNS)]
    computed = {name: array for name, array in expected.items() if name in results[0]}
    return {name: max(_distance(each[name], array) for each in results) for name, array in computed.items()}


def _distance(computed: np.ndarray, expected: np.ndarray) -> float:
    expected = np.resize(expected, computed.shape)
    distance = float(np.linalg.norm(computed - expected) / np.linalg.norm(expected))
    return distance if np.isfinite(distance) else np.inf


def _program(
    problem: Problem, backend: str, arrays: Mapping[str, np.ndarray], with_gradients: bool
) -> tuple[Callable[..., dict[str, Any]], tuple[Any, ...]]:
    """Return a jitted function, and arguments for it on the device. The function returns its results by name."""
    common: dict[str, Any] = {"backend": backend, "scale": problem.scale, "return_lse": True}
    if problem.operator == "fmha":
        operator = functools.partial(attention, is_causal=problem.is_causal[0], **common)
    else:
        operator = functools.partial(_OPERATORS[problem.rank], **problem.windows._asdict(), **common)

    def run(operands: dict[str, Any], cotangents: tuple[Any, Any]) -> dict[str, Any]:
        if not with_gradients:
            return dict(zip(("out", "lse"), operator(**operands), strict=True))
        outputs, pullback = jax.vjp(lambda operands: operator(**operands), operands)
        (gradients,) = pullback(cotangents)
        return {"out": outputs[0], "lse": outputs[1], **{f"d_{name}": each for name, each in gradients.items()}}

    cotangents = arrays["out_cotangent"], arrays["logsumexp_cotangent"].astype(problem.element.accumulator)
    return jax.jit(run), jax.device_put((operands_of(arrays), cotangents))


def _milliseconds(problem: Problem, backend: str, pass_: Pass) -> float | str:
    """Return the median time of a call in milliseconds. If the call raises an error, return the error as text."""
    try:
        with jax.enable_x64(problem.dtype == "float64"):
            run, arguments = _program(problem, backend, arrays_of(problem), pass_ == "backward")
            jax.block_until_ready(run(*arguments))
            times: list[float] = []
            min_calls, max_calls = _TIMED_CALLS
            while len(times) < min_calls or (sum(times) < _TIMED_SECONDS and len(times) < max_calls):
                start = time.perf_counter()
                jax.block_until_ready(run(*arguments))
                times.append(time.perf_counter() - start)
    except Exception as error:  # JAX, the compiler and the device raise errors of many types
        return _failure(error, 300)
    return 1e3 * statistics.median(times)


def _failure(error: Exception, length: int) -> str:
    return f"FAILED: {type(error).__name__}: {' '.join(str(error).split())[:length]}"


def _shown(figure: float | str) -> str:
    return figure if isinstance(figure, str) else f"{figure:.3g}"


def _label(problem: Problem) -> str:
    """Describe the windows, batch size, heads, head dimensions and element type of a problem."""
    heads = "/".join(dict.fromkeys((str(problem.heads), str(problem.heads_kv))))
    width = "/".join(dict.fromkeys((str(problem.head_dim), str(problem.head_dim_v))))
    return f"  {problem.describe()}, {problem.batch} x {heads} heads of {width}, {problem.dtype}"
