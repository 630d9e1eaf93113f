"""``python -m natten_jax.doctor``: report the installation, the build, and why each backend can or cannot run here.

``--problem`` takes the profiler's flags that describe a problem. The report then lists all backends. If a backend can
run the problem, the report shows tiles and the size of the scratch memory; otherwise it shows why the backend cannot.
The report also shows the problem's entry in the package's table of measured configurations.

``--check NAME`` compares the results of the backend NAME on this device with attention in float64. It also measures the
times of the backend.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp

from natten_jax import backends, source_tree
from natten_jax.arrays.operands import Cotangents, Inputs, Operands, Output, Saved
from natten_jax.autotuning import tables
from natten_jax.backends import select
from natten_jax.backends.base import Backend
from natten_jax.doctor import backend_check
from natten_jax.element_types import SUPPORTED_DTYPES, WIDE_DTYPES
from natten_jax.native import module as native
from natten_jax.performance import PASSES, Pass
from natten_jax.plan.devices import Device, NoDeviceError, default_jax_device, local_devices
from natten_jax.plan.plan import BackendId, ConfigurationTable, Plan, Request
from natten_jax.problem import Operator, Problem, problem_of
from natten_jax.profiler.cli import run_program
from natten_jax.profiler.measure import shapes_of
from natten_jax.profiler.options import Options, parse
from natten_jax.version import __version__


def main() -> int:
    """Run the command, and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m natten_jax.doctor", description=__doc__)
    parser.add_argument("--problem", nargs=argparse.REMAINDER, metavar="FLAG", help="the profiler's flags")
    parser.add_argument("--check", metavar="NAME", help="compare a backend with float64 on this device, and time it")
    given = parser.parse_args()
    if given.check is not None:
        try:
            id_ = backend_check.id_of(given.check)
        except ValueError as error:
            parser.error(f"--check: {error}")
        return run_program(parser.prog, lambda: backend_check.check(id_))
    # With --dry-run, the parser accepts devices that this machine does not have.
    options = None if given.problem is None else parse([*given.problem, "--dry-run"])

    lines = report() if options is None else report_problem(options)
    return run_program(parser.prog, lambda: print(*lines, sep="\n"))


def report() -> Iterator[str]:
    yield f"natten_jax {__version__}, Python {platform.python_version()}, {platform.platform()}"
    yield ", ".join(f"{name} {_version(name)}" for name in ("jax", "jaxlib", "flax", "numpy"))
    yield ""
    yield from _native_lines()
    yield ""
    yield "Devices"
    if reason := _no_device():
        yield f"  none: {reason}. The following lines describe the host, even if JAX is not set up to use it"
    for jax_device in () if reason else jax.devices():
        capability = getattr(jax_device, "compute_capability", None)
        detail = f", compute capability {capability}" if capability else ""
        yield f"  {jax_device.id}: {jax_device.device_kind} ({jax_device.platform}{detail})"
    missing = []
    for device in local_devices():
        yield ""
        yield f"Backends on {device}"
        for id_ in backends.ids():
            yield f"  {id_!s:<14} {_verdict(backends.by_id(id_), id_.operator, device)}"
        yield f"Tuned configurations on {device}"
        yield f"  {table_line(device)}"
        # Report the kernels for this device that this build lacks but that another build could contain.
        lacking = select.missing_kernels_of(backends.registered(), _problem("fna", "bfloat16"), device, "forward")
        missing += [] if lacking is None else [f"  {device}: {lacking}"]
    yield from ["", "Missing kernels", *missing] if missing else []


def _no_device() -> str | None:
    """Return the reason why JAX cannot find a device; ``None`` if JAX finds a device."""
    try:
        default_jax_device()
    except NoDeviceError as error:
        return str(error)
    return None


def report_problem(options: Options) -> Iterator[str]:
    """Yield the lines of the report about a problem.

    The report is for the device that the options select. If they select no device, it is for each kind of device that
    this process can use.
    """
    assumed_device = options.assumed_device
    if assumed_device is None and (reason := _no_device()):
        yield f"{reason}. The answers are for the host; use --compute-capability X.Y for an NVIDIA GPU"
    for device in local_devices() if assumed_device is None else [assumed_device]:
        for call in options.sub_calls:
            problem = call.request.problem
            yield f"{problem.describe()}, {problem.dtype}, on {device}"
            for pass_ in options.passes:
                yield f"  {pass_}"
                for backend in backends.registered():
                    name = str(BackendId(backend.family, problem.operator))
                    yield f"    {name:<14} {_plan(backend, call.request, device, pass_)}"
                yield f"    {'tuned':<14} {problem_line(call.request, device, pass_)}"


def _plan(backend: Backend, request: Request, device: Device, pass_: Pass) -> str:
    if reason := backend.rejection(request.problem, device, pass_):
        return f"no: {reason}"
    plan = select.plan_with(backend, Request(request.problem), device, pass_)
    q_tile, kv_tile = plan.tiles
    held = "as XLA plans it" if backend.capabilities.is_plain_jax else f"{scratch_bytes(plan):,} bytes"
    return f"query tile {q_tile}, key/value tile {kv_tile}, scratch memory {held}"


def table_line(device: Device) -> str:
    """Describe the package's table of measured configurations for a device."""
    table = tables.shipped(device)
    if table is None:
        return f"miss: {_no_table(device)}"
    problems = {each.plan.problem for each in table.passes}
    faster = sum(not each.is_default for each in table.passes)
    stale = sum(select.staleness(each.plan, device) is not None for each in table.passes)
    left_alone = f"; {stale} are not used, because this build does not offer their configuration" if stale else ""
    return (
        f"hit: the table of {table.device} has {len(problems)} problems; {faster} of their {len(table.passes)} passes "
        f"use another configuration than the default{left_alone}"
    )


def problem_line(request: Request, device: Device, pass_: Pass) -> str:
    """Describe the measured configuration of a pass, or explain why the pass does not use one."""
    table: ConfigurationTable | None = tables.shipped(device) if request.tuned is None else request.tuned
    if table is None:
        return f"miss: {_no_table(device)}"
    entry = tables.measured(request, device, pass_)
    if entry is None:
        if tables.names_configuration(request, pass_) or request.backend is not None:
            return "miss: the call names a configuration"
        same = "batch, heads and element type must also be equal"
        return f"miss: the table of {table.device} does not contain this problem; {same}"
    if reason := select.staleness(entry.plan, device):
        return f"miss: it was measured, but this build cannot run the measured configuration: {reason}"
    times = f"{1e3 * entry.default_seconds:.4g} ms"
    if entry.is_default:
        return f"hit: no configuration was clearly faster than the default ({times})"
    q_tile, kv_tile = entry.plan.tiles
    gain = entry.default_seconds / entry.seconds
    return (
        f"hit: {entry.plan.backend}, query tile {q_tile}, key/value tile {kv_tile}; "
        f"{1e3 * entry.seconds:.4g} ms, by default {times} ({gain:.2f} times as fast)"
    )


def _no_table(device: Device) -> str:
    if tables.is_switched_off():
        return f"{tables.VARIABLE}=0 turns tables off"
    have = ", ".join(sorted(tables.shipped_tables())) or "no device"
    return f"the package has no table for {device.product or device}, only for {have}"


def scratch_bytes(plan: Plan) -> int:
    """Count the bytes of scratch memory that a pass needs.

    The number is the size of all results of custom calls minus the size of the results of the pass.

    Args:
        plan: The plan of a pass on a backend that makes custom calls.
    """
    backend = backends.by_id(plan.backend)

    def run(operands: Operands, output: Output) -> Any:
        if plan.pass_ == "forward":
            return backend.forward(plan, operands)[:2]
        return backend.backward(plan, operands, Saved(*output, output.logsumexp), Cotangents(*output))

    dtype, shapes = jnp.dtype(plan.problem.dtype), shapes_of(plan.problem)
    arrays: dict[str, Any] = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}
    out = arrays.pop("out_cotangent")
    lse: Any = jax.ShapeDtypeStruct(out.shape[:-1], jnp.float32)
    arguments = Operands(Inputs(**arrays)), Output(out, lse)
    traced = jax.make_jaxpr(run)(*arguments)
    results = jax.tree.leaves(jax.eval_shape(run, *arguments))
    written, kept = (
        sum(each.size * each.dtype.itemsize for each in group) for group in (_written(traced.jaxpr), results)
    )
    return int(written - kept)


def _written(jaxpr: Any) -> Iterator[Any]:
    """Yield the types of all results of custom calls in a jaxpr and in its inner jaxprs."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "ffi_call":
            yield from (variable.aval for variable in equation.outvars)
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda value: hasattr(value, "eqns")):
            if hasattr(called := getattr(inner, "jaxpr", inner), "eqns"):
                yield from _written(called)


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
    if mismatch := native.mismatch():
        yield f"  Another CUDA: {mismatch}"


def _verdict(backend: Backend, operator: Operator, device: Device) -> str:
    forward, backward = (_verdict_of_pass(backend, operator, device, pass_) for pass_ in PASSES)
    verdict = forward if forward == backward else f"forward: {forward}; backward: {backward}"
    small = [dtype for dtype in SUPPORTED_DTYPES if dtype not in WIDE_DTYPES]
    runs = [dtype for dtype in small if backend.rejection(_problem(operator, dtype), device, "forward") is None]
    return f"{verdict}; forward only: {', '.join(runs)}" if runs else verdict


def _verdict_of_pass(backend: Backend, operator: Operator, device: Device, pass_: Pass) -> str:
    reasons = {dtype: backend.rejection(_problem(operator, dtype), device, pass_) for dtype in WIDE_DTYPES}
    runs = [dtype for dtype, reason in reasons.items() if reason is None]
    return f"runs {', '.join(runs)}" if runs else f"no: {reasons['bfloat16']}"


def _problem(operator: Operator, dtype: str) -> Problem:
    """Return a problem whose layout, windows and heads every backend family supports.

    A backend can then reject the problem only because of the element type, the pass, the build or the device.
    """
    return problem_of((128,), None if operator == "fmha" else 32, operator=operator, dtype=dtype)


if __name__ == "__main__":
    sys.exit(main())
