"""``python -m natten_jax.doctor``: what is installed, what was built, and which backend can run here and why.

With ``--problem`` and the profiler's flags that describe one: which backend runs that problem, with which tiles,
how much scratch memory its kernels take, and what was measured of it elsewhere. With ``--check NAME``: whether a
backend computes on this device what attention in float64 does, and how fast it is there.
"""

from __future__ import annotations

import argparse
import platform
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata

import jax

from natten_jax import backends, source_tree
from natten_jax.backends import select
from natten_jax.backends.base import Backend
from natten_jax.backends.select import plan_with, resolve
from natten_jax.doctor import backend_check, mesh_check, scratch_memory, tuned_tables
from natten_jax.element_types import SUPPORTED_DTYPES, WIDE_DTYPES
from natten_jax.native import module
from natten_jax.native import module as native
from natten_jax.performance import PASSES, Pass
from natten_jax.plan.devices import Device, NoDeviceError, default_jax_device, local_devices
from natten_jax.plan.plan import BackendId
from natten_jax.plan.request import Request
from natten_jax.problem import Operator, Problem, problem_of
from natten_jax.profiler import arguments
from natten_jax.profiler.cli import run_program
from natten_jax.profiler.options import Options
from natten_jax.profiler.workload import passes, sub_calls_of
from natten_jax.version import __version__


def main() -> int:
    """Print the report."""
    parser = argparse.ArgumentParser(prog="python -m natten_jax.doctor", description=__doc__)
    parser.add_argument("--problem", nargs=argparse.REMAINDER, metavar="FLAG", help="the profiler's flags")
    parser.add_argument("--check", metavar="NAME", help="compare a backend with float64 on this device, and time it")
    found = parser.parse_args()
    if found.check is not None:
        try:
            id_ = backend_check.id_of(found.check)
        except ValueError as error:
            parser.error(f"--check: {error}")
        return run_program(parser.prog, lambda: backend_check.check(id_))
    flags = found.problem
    # Without running it, the problem may be of another device.
    lines = report() if flags is None else report_problem(arguments.parse([*flags, "--dry-run"]))
    return run_program(parser.prog, lambda: _print(lines))


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        print(line)


def report() -> Iterator[str]:
    """The lines of the report."""
    yield f"natten_jax {__version__}, Python {platform.python_version()}, {platform.platform()}"
    yield ", ".join(f"{name} {_version(name)}" for name in ("jax", "jaxlib", "flax", "numpy"))
    yield ""
    yield from _native_lines()
    yield ""
    yield "Devices"
    yield from _device_lines()
    for device in local_devices():
        yield ""
        yield f"Backends on {device}"
        for id_ in backends.ids():
            yield f"  {id_!s:<14} {_verdict(backends.of(id_), id_.operator, device)}"
        yield f"Tuned configurations on {device}"
        yield f"  {tuned_tables.table_line(device)}"
    yield from _missing_kernels_lines()


def _no_device() -> str | None:
    """Why JAX has no device; ``None`` where it has one."""
    try:
        default_jax_device()
    except NoDeviceError as error:
        return str(error)
    return None


def _device_lines() -> Iterator[str]:
    if reason := _no_device():
        yield f"  none: {reason}. What follows is of the host, whether JAX may use it or not"
        return
    for device in jax.devices():
        capability = getattr(device, "compute_capability", None)
        detail = f", compute capability {capability}" if capability else ""
        yield f"  {device.id}: {device.device_kind} ({device.platform}{detail})"
    if len(jax.local_devices()) > 1:
        yield _mesh_line(jax.local_devices())


def _mesh_line(devices: Sequence[jax.Device]) -> str:
    """Over which kinds of mesh axes operators are split here: seen by splitting a small call over two devices."""
    works, fails = [], []
    for mode, run in mesh_check.MODES.items():
        try:
            mesh_check.check(run, devices[:2])
            works.append(mode)
        except Exception as error:  # whatever JAX, the partitioner or a device has to say
            reason = textwrap.shorten(str(error), 100, placeholder=" ...") or type(error).__name__
            fails.append(f"; not {mode}: {reason}")
    split = f"operators are split over mesh axes of type {', '.join(works)}" if works else "no operator is split"
    return f"  {len(devices)} devices: {split} with JAX {jax.__version__}{''.join(fails)}. See docs/scaling.md"


def _missing_kernels_lines() -> Iterator[str]:
    """Devices for which this build lacks kernels that another one would have."""
    title = ["", "Missing kernels"]
    for device in local_devices():
        lack = select.missing_kernels_of(backends.registered(), _problem("fna", "bfloat16"), device, "forward")
        if lack is not None:
            yield from (*title, f"  {device}: {lack}")
            title = []


def report_problem(options: Options) -> Iterator[str]:
    """The lines about one problem, on every device of this process or the one that is asked about."""
    asked_about = options.asked_about
    if asked_about is None and (reason := _no_device()):
        yield f"{reason}. This is about the host; --compute-capability X.Y asks about an NVIDIA GPU"
    for device in local_devices() if asked_about is None else [asked_about]:
        for call in sub_calls_of(options):
            problem = call.request.problem
            yield f"{problem.describe()}, {problem.dtype}, on {device}"
            for pass_ in passes(options):
                yield f"  {pass_}"
                for backend in backends.registered():
                    name = str(BackendId(backend.family, problem.operator))
                    yield f"    {name:<14} {_plan(backend, call.request, device, pass_)}"
                yield f"    {'tuned':<14} {tuned_tables.problem_line(call.request, device, pass_)}"


def _plan(backend: Backend, request: Request, device: Device, pass_: Pass) -> str:
    reason = backend.rejection(request.problem, device, pass_)
    if reason is not None:
        return f"no: {reason}"
    plan = plan_with(backend, Request(request.problem), device, pass_)
    q_tile, kv_tile = plan.tiles
    held = "as XLA plans it" if backend.is_plain_xla else f"{scratch_memory.scratch_bytes(plan):,} bytes"
    return f"query tile {q_tile}, key/value tile {kv_tile}, scratch memory {held}"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _native_lines() -> Iterator[str]:
    if native.load_error is not None:
        yield f"Native module: not available: {native.load_error}"
        return
    lender = " (of the installed natten_jax, built from the same csrc)" if source_tree.is_unbuilt() else ""
    yield f"Native module: {native.path()}{lender}"
    info = native.build_info()
    yield from (f"  {name}: {value}" for name, value in info.items())
    if staleness := source_tree.staleness(info.get("sources")):
        yield f"  Another csrc: {staleness}"
    if mismatch := module.mismatch():
        yield f"  Another CUDA: {mismatch}"


def _verdict(backend: Backend, operator: Operator, device: Device) -> str:
    forward, backward = (_verdict_of_pass(backend, operator, device, pass_) for pass_ in PASSES)
    verdict = forward if forward == backward else f"forward: {forward}; backward: {backward}"
    small = [dtype for dtype in SUPPORTED_DTYPES if dtype not in WIDE_DTYPES]
    runs = [dtype for dtype in small if backend.rejection(_problem(operator, dtype), device, "forward") is None]
    return f"{verdict}; forward alone: {', '.join(runs)}" if runs else verdict


def _verdict_of_pass(backend: Backend, operator: Operator, device: Device, pass_: Pass) -> str:
    reasons = {dtype: backend.rejection(_problem(operator, dtype), device, pass_) for dtype in WIDE_DTYPES}
    runs = [dtype for dtype, reason in reasons.items() if reason is None]
    if runs:
        return f"runs {', '.join(runs)}"
    substitute = ""
    if pass_ == "backward" and backend.rejection(_problem(operator, "bfloat16"), device, "forward") is None:
        chosen = resolve(Request(_problem(operator, "bfloat16")), device, pass_)
        substitute = f" ({chosen.backend} computes its gradients)"
    return f"no: {reasons['bfloat16']}{substitute}"


def _problem(operator: Operator, dtype: str) -> Problem:
    """One that every backend family is made for: where it is refused, the reason lies with the machine."""
    return problem_of((128,), None if operator == "fmha" else 32, operator=operator, dtype=dtype)


if __name__ == "__main__":
    sys.exit(main())
