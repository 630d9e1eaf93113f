"""Time operators and a training step on one and on several devices, for several ways to split the arrays.

Each time is the wall time per call of a program that is launched many times without waiting in between. This time
includes communication, but not launch latency. The programs for one device and for several devices alternate in one
process. In each turn, every program is timed once. These measurements have the same minimum duration for all programs.
Otherwise, a short measurement would end before the GPU slows down at its power limit. A speed-up is the ratio of the
time on one device to the time on several devices in the same turn, as the median over turns. The time on one device is
measured on the first device. Each of the other devices is also timed separately, because several devices together are
as slow as the slowest of them.

If tokens are split, two more programs are timed. The first program receives all halos before any computation. The
second program is timed only on GPUs, and copies halos between device memories without kernels. A profiler trace gives
the time of halo exchanges, and the part of this time that overlaps computation.

Example:
    python bench/run.py several_devices --json results.json
    python bench/run.py several_devices --splits heads --families hopper --modes Explicit --passes forward
    python bench/run.py several_devices --splits width-s1x1x1 height-s6x8x8 sequence --families hopper --modes Auto \
        --no-training
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import itertools
import math
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from benchmarks import BENCHMARKS, Benchmark
from devices.exchanges import exchange_milliseconds, halos_first, timeline
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from lib import command
from lib.environment import present_devices
from lib.implementations import ours
from lib.record import save
from lib.timing import ratio

from natten_jax.plan.devices import default_device
from natten_jax.profiler.capture import Launch, capture_by_device
from natten_jax.profiler.program import Program, compile_for_trace

MODES = {"Auto": AxisType.Auto, "Explicit": AxisType.Explicit}
PASSES = ("forward", "forward+backward")
EXCHANGE = "exchange milliseconds"
HALOS_FIRST, COPIED = "halos first", "halos copied"
#: XLA options for GPUs, for JAX 0.11 or later. With these options, collective permutes between devices of one process
#: are copies instead of kernels.
COPIES_HALOS: dict[str, str | bool] = {"xla_gpu_collective_permute_mode": "COLLECTIVES_PEER_MEMORY"}
Name = TypeVar("Name")
COLLECTIVES = re.compile(r"= \S+ (all-gather|all-to-all|collective-permute|all-reduce)(?:-start)?\(")
EXAMPLE = Path(__file__).parents[1] / "examples" / "train_sharded.py"


#: Arguments of the training example. The training step is large enough to keep a device busy.
STEP = "--tokens 8 48 48 --patch 8 --depth 4 --heads 12 --head-dim 64 --window 4 16 16 --batch-size 8 --dtype bfloat16"


class Split(NamedTuple):
    """A problem, and the dimension of ``[batch, *layout, heads, head_dim]`` that is split over devices."""

    benchmark: Benchmark
    axis: int


def splits(devices: int) -> dict[str, Split]:
    """Return the splits by name.

    If the batch or the heads are split, the problem grows with the number of devices. If tokens are split, it does not.
    """
    video = BENCHMARKS["3d-s16x8x8"]
    found = {
        "batch": Split(dataclasses.replace(video, batch=devices, heads=12), 0),
        "heads": Split(dataclasses.replace(video, heads=12 * devices), -2),
    }
    for stride in ((1, 1, 1), (6, 8, 8), (16, 8, 8)):
        for name, axis in (("time", 1), ("height", 2), ("width", 3)):
            text = "x".join(map(str, stride))
            found[f"{name}-s{text}"] = Split(dataclasses.replace(video, stride=stride), axis)
    sequence = Benchmark((131072,), 8, 128, kernel_size=(4096,), is_causal=True)
    return found | {"sequence": Split(sequence, 1)}


def seconds(function: Callable[..., Any], arguments: Sequence[Any], calls: int) -> float:
    """Return the wall time per call, in seconds, of ``calls`` calls without waiting in between."""
    jax.block_until_ready(function(*arguments))
    started = time.perf_counter()
    for _ in range(calls):
        results = function(*arguments)
    jax.block_until_ready(results)
    return (time.perf_counter() - started) / calls


def operator_of(benchmark: Benchmark, family: str, pass_: str) -> Callable[..., Any]:
    """Return a function that runs the pass. Its arguments are the output's cotangent, query, key and value."""
    attend = ours(benchmark, family)
    if pass_ == "forward":
        return lambda cotangent, *arrays: attend(*arrays)

    def gradients(cotangent: jax.Array, *arrays: jax.Array) -> Any:
        output, vjp = jax.vjp(attend, *arrays)
        return output, vjp(cotangent)

    return gradients


def difference(results: Any, expected: Any) -> float:
    """Return the largest relative difference between results and expected results.

    The differences in an array are relative to the largest magnitude in the expected array.
    """

    def relative_error(result: jax.Array, other: jax.Array) -> float:
        wide, reference = (jax.device_get(array).astype("float32") for array in (result, other))
        return float(abs(wide - reference).max() / abs(reference).max())

    return max(map(relative_error, jax.tree.leaves(results), jax.tree.leaves(expected)))


def measure(split: str, mode: str, family: str, pass_: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure a pass of an operator for one split, one type of mesh axes and one backend family."""
    devices = jax.devices()[: options.devices]
    benchmark, axis = splits(len(devices))[split]
    mesh = jax.make_mesh((len(devices),), ("devices",), axis_types=(MODES[mode],), devices=devices)
    spec: list[str | None] = [None] * len(benchmark.shape)
    spec[axis] = "devices"
    keys = jax.random.split(jax.random.key(0), 4)
    whole = [jax.random.normal(key, benchmark.shape, benchmark.dtype) for key in keys]
    parts = [jax.device_put(array, NamedSharding(mesh, P(*spec))) for array in whole]
    function = operator_of(benchmark, family, pass_)
    on_one = jax.jit(function).lower(*whole).compile()
    on_several = jax.jit(function).lower(*parts).compile()
    programs = {"one": (on_one, whole), "several": (on_several, parts)}
    for number, device in enumerate(devices[1:], 1):
        there = jax.device_put(whole, device)
        programs[f"one: {number}"] = jax.jit(function).lower(*there).compile(), there
    is_exchanging = axis not in (0, -2)
    if is_exchanging:
        with halos_first():
            # Use a new function object: for the same object, JAX would reuse the program that it compiled before.
            apart_first = jax.jit(lambda *arrays: function(*arrays)).lower(*parts).compile()
        programs[HALOS_FIRST] = apart_first, parts
        if devices[0].platform == "gpu" and jax.__version_info__ >= (0, 11):
            copied = jax.jit(lambda *arrays: function(*arrays)).lower(*parts)
            programs[COPIED] = copied.compile(compiler_options=COPIES_HALOS), parts
    apart = difference(on_several(*parts), on_one(*whole))
    times = take_turns(programs, options)
    further: dict[str, Any] = {}
    if is_exchanging:
        to_trace = compile_for_trace(lambda *arrays: function(*arrays), *parts)
        traced = Launch(lambda: to_trace(*parts), Program.from_compiled(to_trace))
        (captured,) = capture_by_device([traced], options.calls, default_device().platform, with_memory=True)
        further[EXCHANGE] = exchange_milliseconds(captured, traced.program)
        further["timeline"] = timeline(captured, traced.program)
    return further | {
        "problem": benchmark.problem.describe(),
        "milliseconds": {name: 1e3 * statistics.median(values) for name, values in times.items()},
        "speedup": ratio(times["one"], times["several"]),
        "bytes": {"one": memory(on_one), "several": memory(on_several)},
        "collectives": collectives(on_several),
        "difference": apart,
    }


def take_turns(
    programs: Mapping[Name, tuple[jax.stages.Compiled, Sequence[jax.Array]]], options: argparse.Namespace
) -> dict[Name, list[float]]:
    """Run programs alternately; return the seconds per call in each turn, by the program's name.

    Args:
        programs: Programs with their arguments, by name.
        options: Options that :func:`add_turns` adds.
    """
    times: dict[Name, list[float]] = {name: [] for name in programs}
    calls = {
        name: max(options.calls, math.ceil(options.seconds / seconds(program, arguments, options.calls)))
        for name, (program, arguments) in programs.items()
    }
    for _ in range(options.turns):
        for name, (program, arguments) in programs.items():
            time.sleep(options.pause)
            times[name].append(seconds(program, arguments, calls[name]))
    return times


def add_turns(parser: argparse.ArgumentParser) -> None:
    """Add the command-line options for the number of turns, their length, and the pauses between them."""
    parser.add_argument("--turns", type=int, default=5, help="alternating measurements of each program")
    parser.add_argument("--calls", type=int, default=10, help="minimum calls per turn")
    parser.add_argument("--seconds", type=float, default=0.5, help="minimum seconds per turn")
    parser.add_argument("--pause", type=float, default=0.3, help="pause before a turn in seconds")


def collectives(program: jax.stages.Compiled) -> dict[str, int]:
    """Count the collectives of a program by kind."""
    found = COLLECTIVES.findall(program.as_text() or "")
    return {kind: found.count(kind) for kind in sorted(set(found))}


def memory(program: jax.stages.Compiled) -> int | None:
    """Return the bytes per device of a program's arguments, results and temporaries; ``None`` if unknown."""
    found = program.memory_analysis()
    if found is None:
        return None
    return int(found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes)


def example() -> ModuleType:
    """Import the training example."""
    spec = importlib.util.spec_from_file_location(EXAMPLE.stem, EXAMPLE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measure_training(model_parallel: int, options: argparse.Namespace) -> dict[str, Any]:
    """Time a step of the training example on one device and on several devices, which alternate.

    Args:
        model_parallel: Number of devices over which the heads of a model are split. It is passed to the example as
            ``--model-parallel``. The other dimension of the mesh is data-parallel.
        options: Command-line options.
    """
    train = example()
    devices = jax.devices()[: options.devices]
    flags = [*STEP.split(), "--model-parallel", str(model_parallel)]
    settings = train.parse([*flags, "--steps", str((1 + options.turns) * options.calls)])
    shape = len(devices) // model_parallel, model_parallel
    runs = {
        "one": train.Run(settings, train.mesh_of(devices[:1], (1, 1))),
        "several": train.Run(settings, train.mesh_of(devices, shape)),
    }
    data = train.Data(settings)
    times: dict[str, list[float]] = {name: [] for name in runs}
    losses: dict[str, list[jax.Array]] = {name: [] for name in runs}
    for turn in range(1 + options.turns):  # the first turn includes compilation, and its times are not used
        batches = [data.batch(turn * options.calls + call) for call in range(options.calls)]
        for name, run in runs.items():
            placed = [run.place(clips) for clips in batches]
            time.sleep(options.pause)
            started = time.perf_counter()
            launched = jax.block_until_ready([run.launch(*frames) for frames in placed])
            times[name].append((time.perf_counter() - started) / options.calls)
            losses[name] += launched
    one, several = (jnp.array([float(loss) for loss in run_losses]) for run_losses in losses.values())
    measured = {name: run_times[1:] for name, run_times in times.items()}
    return {
        "problem": " ".join(flags),
        "milliseconds": {name: 1e3 * statistics.median(values) for name, values in measured.items()},
        "speedup": ratio(measured["one"], measured["several"]),
        "difference": float(jnp.max(jnp.abs(several - one) / one)),
    }


def main() -> int:
    """Measure the selected rows, print a table and save the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, help="number of devices (default: all)")
    parser.add_argument("--splits", nargs="+", choices=splits(1), default=["batch", "heads"])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="kinds of mesh axes")
    parser.add_argument("--families", nargs="+", default=["hopper", "cutlass"], help="backend families")
    parser.add_argument("--passes", nargs="*", choices=PASSES, default=list(PASSES))
    parser.add_argument("--no-training", action="store_true", help="measure only the operators")
    add_turns(parser)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    options.devices = options.devices or len(present_devices())
    rows: dict[str, Callable[[], dict[str, Any]]] = {}
    for split, mode, family, pass_ in itertools.product(
        options.splits, options.modes, options.families, options.passes
    ):
        rows[f"{family} {pass_}, {split}, {mode}"] = functools.partial(measure, split, mode, family, pass_, options)
    if not options.no_training:
        rows["training step, batch"] = lambda: measure_training(1, options)
        rows["training step, heads"] = lambda: measure_training(options.devices, options)
    results: dict[str, dict[str, Any]] = {}
    print(f"{'':42}{'one: ms':>10}{f'{options.devices}: ms':>10}{'speed-up':>10}{'difference':>12}  collectives")
    for name, row in rows.items():
        figures = results[name] = row()
        milliseconds = figures["milliseconds"]
        one, several = (milliseconds[device] for device in ("one", "several"))
        line = f"{name:42}{one:10.3f}{several:10.3f}{figures['speedup']:10.3f}{figures['difference']:12.1e}"
        line += f"  {figures.get('collectives', '')}"
        line += "".join(f"; {way}: {milliseconds[way]:.3f} ms" for way in (HALOS_FIRST, COPIED) if way in milliseconds)
        if EXCHANGE in figures:
            line += "; halo exchange {exchange:.3f} ms, {hidden:.3f} of it hidden".format(**figures[EXCHANGE])
        others = [each for name, each in milliseconds.items() if name.startswith("one: ")]
        if others:
            line += f"; other devices alone: {', '.join(f'{each:.3f}' for each in others)} ms"
        print(line, flush=True)
        save(results, options.json)
    return 0


if __name__ == "__main__":
    command.run(main)
