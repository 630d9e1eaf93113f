"""Time operators and a training step on 1, 2, 4, ... devices, and compare the operators' times with predictions.

In strong scaling, the problem has the same size for any number of devices. In weak scaling, the split dimension grows
with the number of devices, so that the work per device is constant. Each time is the wall time per call of a program
that is launched many times without waiting in between. The programs for different numbers of devices alternate in one
process. In each turn, every program is timed once. A speed-up is the ratio of the throughput on several devices to the
throughput on one device in the same turn, as the median over turns. The predictions come from the time model. They are
all computed and saved before the first measurement.

Example:
    python bench/run.py scaling --devices 8 --json scaling.json
    python bench/run.py scaling --devices 2 --rows strong --splits width-s1x1x1 sequence --json scaling.json
    python bench/run.py scaling --devices 256 --predict-only --json predicted.json
    XLA_FLAGS=--xla_force_host_platform_device_count=8 python bench/run.py scaling --devices 8 --small --families cpu \
        --turns 1 --calls 1 --pause 0 --splits width-s6x8x8 heads
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import several_devices
from benchmarks import Benchmark
from devices.predictions import figures, predictions, relative_errors
from devices.problems import SCALINGS, Curve, curves
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from lib import command
from lib.environment import present_devices
from lib.record import save
from several_devices import (
    MODES,
    PASSES,
    add_turns,
    collectives,
    difference,
    measure_training,
    memory,
    operator_of,
    take_turns,
)

TRAINING = "training"

#: Arguments of the training example if ``--small`` is given.
SMALL_STEP = "--tokens 2 4 4 --depth 1 --heads 2 --head-dim 8 --window 2 3 3 --batch-size 8"


class Row(NamedTuple):
    """A curve, and the backend family and the pass for which it is measured."""

    curve: Curve
    family: str
    pass_: str

    def __str__(self) -> str:
        return f"{self.family} {self.pass_}, {self.curve.scaling} {self.curve.name}"


def predict(row: Row, counts: Sequence[int]) -> dict[str, Any]:
    """Predict a row. The returned record of the row has a point for each number of devices."""
    curve = row.curve
    obstacles = {devices: curve.obstacle(devices) for devices in counts}
    able = [devices for devices, obstacle in obstacles.items() if obstacle is None]
    predicted = predictions(curve, row.family, row.pass_, able)
    points: list[dict[str, Any]] = []
    for devices, obstacle in obstacles.items():
        point = {"devices": devices, "problem": describe(curve.benchmark(devices))}
        points.append(point | ({"predicted": predicted.get(devices)} if obstacle is None else {"skipped": obstacle}))
    return {
        "scaling": curve.scaling,
        "split": curve.name,
        "family": row.family,
        "pass": row.pass_,
        "points": points,
    }


def describe(benchmark: Benchmark) -> str:
    """Format a problem, its heads and its element type for the record."""
    return f"{benchmark.problem.describe()}, {benchmark.heads} heads of {benchmark.head_dim}, {benchmark.dtype}"


def measure(row: Row, counts: Sequence[int], options: argparse.Namespace) -> dict[int, dict[str, Any]]:
    """Measure a row; return the figures, by number of devices."""
    function = operator_of(row.curve.on_one.benchmark, row.family, row.pass_)
    programs: dict[int, tuple[jax.stages.Compiled, list[jax.Array]]] = {}
    for devices in counts:
        arrays = draw(row.curve.benchmark(devices), row.curve.on_one.axis, jax.devices()[:devices])
        programs[devices] = jax.jit(function).lower(*arrays).compile(), arrays
    apart = {devices: distance(row.curve, function, *program) for devices, program in programs.items()}
    times = take_turns(programs, options)
    return {
        devices: {
            **figures(row.curve, devices, times[1], times[devices]),
            "bytes": memory(program),
            "collectives": collectives(program),
            "difference": apart[devices],
        }
        for devices, (program, _) in programs.items()
    }


def draw(benchmark: Benchmark, axis: int, devices: Sequence[jax.Device]) -> list[jax.Array]:
    """Draw random arrays: the output's cotangent, query, key and value. Each device holds only its part of an array."""
    sharding: jax.sharding.Sharding = SingleDeviceSharding(devices[0])
    if len(devices) > 1:
        mesh = jax.make_mesh((len(devices),), ("devices",), axis_types=(MODES["Auto"],), devices=devices)
        spec: list[str | None] = [None] * len(benchmark.shape)
        spec[axis] = "devices"
        sharding = NamedSharding(mesh, P(*spec))

    def arrays(keys: jax.Array) -> list[jax.Array]:
        return [jax.random.normal(key, benchmark.shape, benchmark.dtype) for key in keys]

    return jax.jit(arrays, out_shardings=sharding)(jax.random.split(jax.random.key(0), 4))


def distance(
    curve: Curve, function: Callable[..., Any], program: jax.stages.Compiled, arrays: Sequence[jax.Array]
) -> float:
    """Return the largest relative difference between the program's results and the results on one device.

    Only some heads are compared, because all heads may need more memory than one device has.
    """
    devices, heads = len(arrays[0].devices()), arrays[0].shape[-2]
    # If the heads are split over devices, compare the first head of each device, otherwise only the first head.
    step = heads // devices if curve.is_over_heads else heads

    def some(array: jax.Array) -> jax.Array:
        return jax.device_put(jax.lax.slice_in_dim(array, 0, heads, step, axis=-2), jax.devices()[0])

    return difference(jax.tree.map(some, program(*arrays)), jax.jit(function)(*map(some, arrays)))


def train(counts: Sequence[int], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Time a training step for each number of devices. The clips of a batch are split over the devices.

    The step on several devices alternates with the step on one device.

    Yields:
        A point for each number of devices.
    """
    clips = several_devices.example().parse(several_devices.STEP.split()).batch_size
    for devices in counts[1:]:
        if clips % devices:
            yield {"devices": devices, "skipped": f"{devices} devices cannot share {clips} clips equally"}
            continue
        settings = argparse.Namespace(**{**vars(options), "devices": devices})
        step = measure_training(1, settings)
        times = step["milliseconds"]
        if devices == 2:
            measured = {"milliseconds": times["one"], "speedup": 1.0, "efficiency": 1.0, "difference": 0.0}
            yield {"devices": 1, "problem": step["problem"], "predicted": None, "measured": measured}
        measured = {"milliseconds": times["several"], "speedup": step["speedup"]}
        measured |= {"efficiency": step["speedup"] / devices, "difference": step["difference"]}
        yield {"devices": devices, "problem": step["problem"], "predicted": None, "measured": measured}


def print_points(name: str, points: Sequence[dict[str, Any]]) -> None:
    """Print a line of the table for each point of a row."""
    for point in points:
        line = f"{name:48}{point['devices']:8}"
        if "skipped" in point:
            print(f"{line}  skipped: {point['skipped']}", flush=True)
            continue
        sides = point.get("measured"), point["predicted"]
        for figure, form in (("milliseconds", ".3f"), ("speedup", ".3f"), ("efficiency", ".1%")):
            line += "".join(f"{format(side[figure], form) if side else '-':>11}" for side in sides)
        if measured := point.get("measured"):
            line += f"{measured['difference']:12.1e}  {measured.get('collectives', '')}"
        print(line, flush=True)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [curve.name for curve in curves("strong", is_small=False)]
    parser.add_argument("--devices", type=int, help="measure on powers of two up to this number (default: all)")
    parser.add_argument("--rows", nargs="+", choices=(*SCALINGS, TRAINING), default=[*SCALINGS, TRAINING])
    parser.add_argument("--splits", nargs="+", choices=names, default=names, help="splits of operators")
    parser.add_argument("--families", nargs="+", default=["hopper"], help="backend families")
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=list(PASSES))
    parser.add_argument("--small", action="store_true", help="use a few float32 tokens, for a trial on any machine")
    parser.add_argument(
        "--predict-only", action="store_true", help="predict without measuring, for any number of devices"
    )
    add_turns(parser)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args()


def main() -> int:
    """Predict and measure the selected rows, print a table and save the figures."""
    options = parse()
    if options.small:
        several_devices.STEP = SMALL_STEP
    wanted = options.devices or len(present_devices())
    limit = wanted if options.predict_only else min(wanted, len(present_devices()))
    counts = [2**i for i in range(limit.bit_length())]
    chosen = [
        curve
        for scaling in SCALINGS
        if scaling in options.rows
        for curve in curves(scaling, options.small)
        if curve.name in options.splits
    ]
    rows = [Row(*each) for each in itertools.product(chosen, options.families, options.passes)]
    results = {str(row): predict(row, counts) for row in rows}
    save(results, options.json)
    columns = "".join(f"{name:>11}{'predicted':>11}" for name in ("ms", "speed-up", "efficiency"))
    print(f"{'':48}{'devices':>8}{columns}{'difference':>12}  collectives")
    for row in rows:
        points = results[str(row)]["points"]
        if not options.predict_only:
            able = [point for point in points if "skipped" not in point]
            measured = measure(row, [point["devices"] for point in able], options)
            for point in able:
                point["measured"] = measured[point["devices"]]
                if point["predicted"]:
                    point["relative error"] = relative_errors(point["predicted"], point["measured"])
            save(results, options.json)  # save after each row, so that an interrupted run keeps its measurements
        print_points(str(row), points)
    if TRAINING in options.rows and not options.predict_only:
        name, step_points = "training step, strong batch", list[dict[str, Any]]()
        for point in train(counts, options):
            step_points.append(point)
            kind = {"scaling": "strong", "split": "batch", "family": None, "pass": "training step"}
            results[name] = {**kind, "points": step_points}
            print_points(name, [point])
            save(results, options.json)
    return 0


if __name__ == "__main__":
    command.run(main)
