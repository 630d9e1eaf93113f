"""``python -m natten_jax.doctor --check NAME``: a backend on the device at hand, beside float64, and its times.

For whoever has a device that a backend's makers had not: what is printed says whether to trust it there, and is what a
report of it should hold.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from natten_jax import backends
from natten_jax.backends import select
from natten_jax.backends.base import Backend
from natten_jax.backends.names import unknown
from natten_jax.backends.select import resolve
from natten_jax.doctor import battery, reference
from natten_jax.performance import PASSES, Pass
from natten_jax.plan.devices import Device, default_device, default_jax_device
from natten_jax.plan.plan import BackendId
from natten_jax.plan.request import Request
from natten_jax.problem import OPERATORS, Problem
from natten_jax.profiler.options import arrays_of
from natten_jax.version import __version__

#: Largest ``||result - reference|| / ||reference||``. What is wrong is wrong by far more: a key too many in a window of
#: a hundred is a tenth. Kernels for 8-bit arrays round weights to three bits behind the leading one, too.
BOUNDS = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 2e-5, "float64": 1e-12, "float8_e4m3fn": 5e-2}
#: Runs of each problem: races show in some of them.
RUNS = 3
#: Seconds, and calls, that a time is the median of.
_TIMED_SECONDS, _TIMED_CALLS = 0.3, (3, 50)
#: Heads of problems that are timed.
_HEADS, _HEADS_OF_HOST = 16, 1


def id_of(name: str) -> BackendId:
    """The backend of a name.

    Raises:
        ValueError: There is none; the message says which there are.
    """
    known = {str(id_): id_ for id_ in backends.ids()}
    if name not in known:
        operator = next((each for each in OPERATORS if name.endswith(each)), OPERATORS[0])
        raise ValueError(unknown(name, operator, backends.registered()))
    return known[name]


def check(id_: BackendId) -> int:
    """Check a backend and print what came out.

    Args:
        id_: Which.

    Returns:
        The exit status: 0 where every result is right, 1 where some are not or the backend cannot run here.
    """
    device = default_device()
    session = _Session(id_, backends.of(id_), device, _baseline(id_, device))
    reason = session.cannot_run()
    if reason is not None:
        print(f"{id_} cannot be checked here: {reason}", file=sys.stderr)
        return 1
    _say(f"natten_jax {__version__}, jax {jax.__version__}, {default_jax_device().device_kind} ({device})")
    _say(f"{id_}: errors relative to attention in float64, the largest of {RUNS} runs")
    wrong = session.compare()
    _say(f"{id_}: times of a call in milliseconds{f', beside {session.baseline}' if session.baseline else ''}")
    session.time()
    _say(f"{session.compared - wrong} of {session.compared} problems are right")
    for line in session.advice(wrong):
        _say(line)
    return 1 if wrong or not session.compared else 0


@dataclasses.dataclass
class _Session:
    """A check.

    Attributes:
        id_: What is checked.
        backend: The same.
        device: Where.
        baseline: What else runs there; ``None`` where there is nothing else.
        compared: Problems whose results were compared so far.
    """

    id_: BackendId
    backend: Backend
    device: Device
    baseline: BackendId | None
    compared: int = 0

    def cannot_run(self) -> str | None:
        """Why no problem can run on the device; ``None`` where one can."""
        reasons = [self._rejection(problem) for problem in self._problems()]
        return None if None in reasons else reasons[0]

    def compare(self) -> int:
        """Print a line for each problem; how many are wrong."""
        wrong = 0
        for problem in self._problems():
            label = f"  {problem.describe()}, {_heads(problem)}, {problem.dtype}"
            if reason := self._rejection(problem):
                _say(f"{label}: left out: {reason}")
                continue
            self.compared += 1
            forward_alone = self._rejection(problem, "backward")
            try:
                errors = _errors(problem, str(self.id_), with_gradients=forward_alone is None)
            except Exception as error:  # whatever JAX, the compiler or the device has to say
                wrong += 1
                _say(f"{label}: FAILED: {type(error).__name__}: {' '.join(str(error).split())[:2000]}")
                continue
            is_right = max(errors.values()) <= BOUNDS[problem.dtype]  # not so where a number is not finite
            wrong += not is_right
            figures = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
            gradients = f"; gradients are left out: {forward_alone}" if forward_alone else ""
            _say(f"{label}: {'right' if is_right else 'WRONG'}: {figures}{gradients}")
        return wrong

    def time(self) -> None:
        """Print the times of each problem that is timed."""
        heads = _HEADS_OF_HOST if self.device.platform == "cpu" else _HEADS
        for problem in battery.timed(self.id_.operator, self._dtypes()[0], heads):
            label = f"  {problem.describe()}, {_heads(problem)}, {problem.dtype}"
            if reason := self._rejection(problem):
                _say(f"{label}: left out: {reason}")
                continue
            figures = [self._figure(problem, pass_) for pass_ in PASSES if self._rejection(problem, pass_) is None]
            _say(f"{label}: {'; '.join(figures)}")

    def _figure(self, problem: Problem, pass_: Pass) -> str:
        what = "forward" if pass_ == "forward" else "with gradients"
        own = _milliseconds(problem, str(self.id_), pass_)
        if self.baseline is None or isinstance(own, str):
            return f"{what} {_shown(own)}"
        other = _milliseconds(problem, str(self.baseline), pass_)
        ratio = "" if isinstance(other, str) else f", {other / own:.2f} times as fast"
        return f"{what} {_shown(own)} ({self.baseline} {_shown(other)}{ratio})"

    def advice(self, wrong: int) -> Iterator[str]:
        """What to do now."""
        if wrong:
            yield f"Do not use {self.id_} on this device, and report what is printed above, please."
            return
        family = self.backend.family
        is_default = resolve(Request(next(self._problems())), self.device, "forward").backend == self.id_
        if self.backend.is_by_name_only and not is_default:
            setting = f"{select.VARIABLE}={family}"
            yield f'backend="{self.id_}" runs it, and {setting} in the environment makes it the default.'
        elif is_default:
            yield f"{self.id_} runs here by default."
        else:
            yield f'backend="{self.id_}" runs it; calls without a name run {self.baseline}.'
        if self.backend.is_by_name_only:
            yield "Nobody has sent a measurement of it so far: report what is printed above, please, times included."

    def _dtypes(self) -> tuple[str, ...]:
        return battery.in_order(tuple(self.backend.dtypes))

    def _problems(self) -> Iterator[Problem]:
        dtypes = *self._dtypes(), *self.backend.float8_dtypes
        return battery.problems(self.id_.operator, dtypes, is_gpu=self.device.platform == "cuda")

    def _rejection(self, problem: Problem, pass_: Pass = "forward") -> str | None:
        return self.backend.rejection(problem, self.device, pass_)


def _baseline(id_: BackendId, device: Device) -> BackendId | None:
    """What runs by default; plain JAX beside the default itself, and nothing beside plain JAX."""
    problem = next(battery.problems(id_.operator, battery.in_order(tuple(backends.of(id_).dtypes))))
    default = resolve(Request(problem), device, "forward").backend
    plain = BackendId(backends.registered()[-1].family, id_.operator)
    return next((each for each in (default, plain) if each != id_), None)


def _errors(problem: Problem, backend: str, *, with_gradients: bool) -> dict[str, float]:
    """The largest error of each result, relative to its norm."""
    arrays = battery.arrays_of(problem)
    entries = battery.different_entries(problem)
    own = reference.Arrays(*(None if each is None else each[:entries] for each in arrays))  # type: ignore[arg-type]
    different = reference.results(dataclasses.replace(problem, batch=entries), own)
    expected = {name: battery.repeated(each, problem) for name, each in different.items()}
    with arrays_of(problem.element.short_name):
        run, arguments = _program(problem, backend, arrays, with_gradients)
        found = [{name: np.asarray(each, np.float64) for name, each in run(*arguments).items()} for _ in range(RUNS)]
    return {name: max(_distance(each[name], expected[name]) for each in found) for name in expected if name in found[0]}


def _distance(found: np.ndarray, expected: np.ndarray) -> float:
    distance = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
    return distance if np.isfinite(distance) else np.inf


def _program(
    problem: Problem, backend: str, arrays: reference.Arrays, with_gradients: bool
) -> tuple[Callable[..., dict[str, Any]], tuple[Any, ...]]:
    """A compiled function that gives results by name, and its arguments on the device."""
    operator = battery.operator_of(problem, backend)

    def run(operands: dict[str, Any], cotangents: tuple[Any, Any]) -> dict[str, Any]:
        if not with_gradients:
            return dict(zip(("out", "lse"), operator(**operands), strict=True))
        outputs, pullback = jax.vjp(lambda operands: operator(**operands), operands)
        (gradients,) = pullback(cotangents)
        return {"out": outputs[0], "lse": outputs[1], **{f"d_{name}": each for name, each in gradients.items()}}

    cotangents = arrays.out_cotangent, arrays.logsumexp_cotangent.astype(problem.element.accumulator)
    return jax.jit(run), jax.device_put((arrays.operands, cotangents))


def _milliseconds(problem: Problem, backend: str, pass_: Pass) -> float | str:
    """The median time of a call; why there is none."""
    try:
        with arrays_of(problem.element.short_name):
            run, arguments = _program(problem, backend, battery.arrays_of(problem), pass_ == "backward")
            jax.block_until_ready(run(*arguments))
            times: list[float] = []
            least, most = _TIMED_CALLS
            while len(times) < least or (sum(times) < _TIMED_SECONDS and len(times) < most):
                start = time.perf_counter()
                jax.block_until_ready(run(*arguments))
                times.append(time.perf_counter() - start)
    except Exception as error:  # as in a comparison
        return f"FAILED: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return 1e3 * statistics.median(times)


def _shown(figure: float | str) -> str:
    return figure if isinstance(figure, str) else f"{figure:.3g}"


def _heads(problem: Problem) -> str:
    """Heads and their widths, as few words as possible."""
    heads = (
        f"{problem.heads} heads" if problem.heads == problem.heads_kv else f"{problem.heads}/{problem.heads_kv} heads"
    )
    width = (
        str(problem.head_dim) if problem.head_dim == problem.head_dim_v else f"{problem.head_dim}/{problem.head_dim_v}"
    )
    return f"{problem.batch} x {heads} of {width}"


def _say(text: str) -> None:
    print(text, flush=True)
