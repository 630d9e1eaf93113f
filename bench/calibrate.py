"""Fit the simulator's time model to measurements on one GPU, and print the prediction errors of the fitted model.

The errors are also printed for problems that are held back from the fit. Run the first command on the GPU. The second
command runs on any machine:

    python bench/run.py calibrate measure --passes forward backward --json bench/results/h200/calibration/hopper.json
    python bench/run.py calibrate fit bench/results/h200/calibration/hopper.json \
        --out natten_jax/cost_model/calibrations/hopper-9.0.json

For kernels whose element type is not 16-bit, add ``--dtype`` to both commands. The fit then changes only the
coefficients of these kernels, not the coefficients that all kernels share.

The measurements for the packaged models are in ``bench/results/h200/calibration`` and, for 8-bit arrays, in
``bench/results/h100/calibration``.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import itertools
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from lib import command
from lib.calibration_problems import EXAMPLES, FITTED, HELD_BACK, SMALL, SMALL_HELD_BACK
from lib.environment import environment

from natten_jax import simulator
from natten_jax.performance import PASSES, Pass, TilePair
from natten_jax.plan.devices import default_device
from natten_jax.problem import Problem
from natten_jax.profiler import capture, search
from natten_jax.profiler.capture import Event
from natten_jax.profiler.measure import Workload, compile_workload
from natten_jax.profiler.options import ELEMENT_TYPES, parse
from natten_jax.profiler.predict import Listing, listings
from natten_jax.profiler.program import Program
from natten_jax.simulator import Calibration, Kernel

SETS = {
    "examples": EXAMPLES,
    "fitted": FITTED,
    "held back": HELD_BACK,
    "small": SMALL,
    "small, held back": SMALL_HELD_BACK,
}
#: Sets of problems for the small-window kernels. The fit does not use the times of these problems; only the prediction
#: errors are shown.
FORM_SETS = "small", "small, held back"

#: Ranks of the tile pairs that are measured in addition to the recommended pair. The pairs are ranked by the current
#: model, and the recommended pair has rank 0.
OTHER_RANKS = (1, 4, 12, 40, 150)

#: Default element type: the type with which kernels for 16-bit elements are measured.
_OWN = "bf16"

#: Lower and upper bounds of coefficients. "slowdown" is the largest relative slowdown at the power limit. "onset" is
#: the duration of a pass, in seconds, at which half of "slowdown" applies. "power" is a factor per kernel, by which
#: "slowdown" is multiplied.
_BOUNDS = {"slowdown": (0.05, 0.4), "onset": (1e-4, 3e-2), "power": (0.02, 1.0)}

#: Weight of the change of a coefficient's logarithm. In comparison, the error of most measurements has weight 1 or 2.
_INERTIA = 3e-3

#: Weight of the deviation of a tile pair's error from the mean error of all tile pairs of the same problem.
_RANKING = 2.0

#: Kernels that take fewer seconds than this are assumed to run at the full clock rate.
_BRIEF = 2e-3


def measure(
    family: str,
    dtype: str,
    pass_: Pass,
    sets: Sequence[str],
    other_ranks: Sequence[int],
    warmup_steps: int,
    iterations: int,
) -> Iterator[list[dict[str, Any]]]:
    """Yield the records of each problem, with device times.

    The recommended tiles are always timed. If the problem is used in the fit, other tiles are also timed, alternately
    with the recommended tiles.
    """
    model = simulator.calibration_for(family)
    device = default_device()
    flags = [] if pass_ == "forward" else ["--backprop"]
    programs = itertools.count()
    for name in sets:
        for line in SETS[name]:
            records: list[dict[str, Any]] = []
            options = parse([*line.split(), "--dtype", dtype, "--backend", f"{family}-fna", *flags])
            problem = options.main_request.problem
            found = [each for each in listings(options, problem, device) if each.pass_ == pass_]
            if not found:
                print(f"{line:60} no {pass_} pass")
                continue
            (offered,) = found
            if is_held_back(name):
                chosen_pairs = list(offered.pairs[:1])
            else:
                # The model's kernels do not include small-window kernels, so no tiles are added per kernel.
                chosen_pairs = chosen(offered, other_ranks, None if name in FORM_SETS else model)
            pairs = [[(1,) * (options.problem.rank - len(tile)) + tile for tile in pair] for pair in chosen_pairs]
            workloads: list[Workload] = []
            for q_tile, kv_tile in pairs:
                arguments = workloads[0].arguments if workloads else None
                with_tiles = search.with_tiles(options, (q_tile, kv_tile), pass_)
                workloads.append(compile_workload(with_tiles, f"measured_{next(programs)}", arguments))
            # First, the recommended tiles are timed without alternation, as in the profiler. Then all pairs are timed
            # alternately.
            times = pass_times(workloads[:1], pass_, warmup_steps, iterations)
            measured = pairs[:1]
            if len(workloads) > 1:
                times += pass_times(workloads, pass_, 3, max(3, iterations // 4))
                measured += pairs
            for number, ((q_tile, kv_tile), seconds) in enumerate(zip(measured, times, strict=True)):
                records.append(
                    {
                        "set": name,
                        "pass": pass_,
                        "arguments": line,
                        "dtype": dtype,
                        "q_tile": q_tile,
                        "kv_tile": kv_tile,
                        "is_recommended": number == 0,
                        "seconds": seconds,
                    }
                )
                print(f"{line:60} {q_tile!s:14} {kv_tile!s:14} {1e3 * seconds:10.4f} ms", flush=True)
            yield records


def is_held_back(name: str) -> bool:
    """Return True if a set of problems is excluded from the fit."""
    return name.endswith("held back")


def chosen(offered: Listing, other_ranks: Sequence[int], model: Calibration | None) -> list[TilePair]:
    """Select the recommended tiles, the tiles at the given ranks, and the best-ranked tiles of every kernel."""
    found = [offered.pairs[rank] for rank in (0, *other_ranks) if rank < len(offered.pairs)]
    kernels: dict[Kernel | None, TilePair] = {}
    for pair in offered.pairs:
        if model is None:
            break
        kernels.setdefault(model.kernel(offered.problem, pair, offered.pass_), pair)
    return list(dict.fromkeys([*found, *kernels.values()]))


def pass_times(workloads: Sequence[Workload], pass_: Pass, warmup_steps: int, iterations: int) -> list[float]:
    """Return the median seconds of one pass for each workload; the workloads run alternately."""
    for workload in workloads:
        for _ in range(warmup_steps):
            jax.block_until_ready(workload.run())
    captured = capture.capture_interleaved(
        [each.launch for each in workloads], iterations, workloads[0].device.platform
    )
    return [
        statistics.median(pass_seconds(events, workload.program, pass_) for events in workload_events)
        for workload, workload_events in zip(workloads, captured, strict=True)
    ]


def pass_seconds(events: list[Event], program: Program, pass_: Pass) -> float:
    """Return the total device time of the launches of one pass, in seconds."""
    marked = [
        event.duration
        for event in events
        if (plan := program.instruction(event.instruction).plan) is not None and plan.pass_ == pass_
    ]
    # If ``pass_`` is forward, the program has no other pass, so all events count. If ``pass_`` is backward, the program
    # has both passes, and events without a plan belong to neither.
    return sum(marked if pass_ == "backward" else [event.duration for event in events]) / 1e9


@dataclasses.dataclass(frozen=True)
class Sample:
    """A measured time, and the inputs from which the model predicts it; ``kernel`` is ``None`` for small windows."""

    record: dict[str, Any]
    kernel: Kernel | None
    counts: simulator.TileCounts
    problem: Problem
    pass_: Pass


def samples(records: list[dict[str, Any]], model: Calibration) -> list[Sample]:
    """Build a sample from each record; skip records with tiles that no kernel of the model supports."""
    found = []
    for record in records:
        pass_ = record["pass"]
        dtype = record.get("dtype", "bf16")
        options = parse([*record["arguments"].split(), "--dtype", dtype, "--backend", f"{model.family}-fna"])
        problem = options.main_request.problem
        pair = tuple(record["q_tile"][-problem.rank :]), tuple(record["kv_tile"][-problem.rank :])
        is_small = record["set"] in FORM_SETS
        kernel = None if is_small else model.kernel(problem, pair, pass_)
        if kernel is None and not is_small:
            print(f"skipped, because no kernel supports these tiles now: {record['arguments']} {pair} {pass_}")
            continue
        counts = simulator.count_tiles(problem, pair, pass_, kernel=kernel)
        found.append(Sample(record, kernel, counts, problem, pass_))
    return found


def fit(every: list[Sample], model: Calibration, dtypes: Sequence[str]) -> Calibration:
    """Fit the model by least squares on the logarithms of times.

    Args:
        every: Measurements.
        model: Initial coefficients.
        dtypes: Element types whose kernels are fitted. Coefficients that all kernels share are fitted only if
            ``dtypes`` equals ``model.dtypes``.
    """
    from scipy.optimize import least_squares

    is_own = tuple(dtypes) == tuple(model.dtypes)
    own_dtypes = () if is_own else tuple(dtypes)
    kernels = [
        (pass_, kernel)
        for pass_, pass_kernels in model.kernels.items()
        for kernel in pass_kernels
        if tuple(kernel.dtypes) == own_dtypes
    ]
    shared = {"launch": model.launch, "backward_launch": model.launch_of("backward")} if is_own else {}
    shared |= {"slowdown": model.slowdown, "onset": model.onset} if is_own else {}
    used = [sample for sample in every if sample.kernel is not None and not is_held_back(sample.record["set"])]
    measured = np.log([sample.record["seconds"] for sample in used])
    weights = np.array([weight(sample.record) for sample in used])
    groups: dict[Any, list[int]] = collections.defaultdict(list)
    for row, sample in enumerate(used):
        groups[turns(sample)].append(row)
    together = [rows for rows in groups.values() if len(rows) > 1]

    def unpack(parameters: Any) -> Calibration:
        values = list(map(float, np.exp(parameters)))
        fitted: dict[str, list[Kernel]] = {pass_: [] for pass_ in model.kernels}
        common: dict[str, Any] = {name: values.pop(0) for name in shared}
        for pass_, pass_kernels in model.kernels.items():
            for kernel in pass_kernels:
                names = costs_of(kernel) if (pass_, kernel) in kernels else ()
                own: dict[str, Any] = {name: values.pop(0) for name in names}
                fitted[pass_].append(dataclasses.replace(kernel, **own))
        return dataclasses.replace(
            model, kernels={pass_: tuple(pass_kernels) for pass_, pass_kernels in fitted.items()}, **common
        )

    def residuals(parameters: Any) -> Any:
        errors = np.log(predicted(used, unpack(parameters))) - measured
        # The model must rank the tile pairs of one problem, and these pairs were measured alternately. Therefore a
        # pair's error relative to the mean error of the problem's pairs has a larger weight than the pair's own
        # error. The residuals with the factor ``_INERTIA`` keep a coefficient unchanged if no measurement depends on
        # the coefficient.
        differences = [errors[rows] - np.mean(errors[rows]) for rows in together]
        return np.concatenate(
            [weights * errors, *(_RANKING * each for each in differences), _INERTIA * (parameters - start)]
        )

    costs = [getattr(kernel, name) for _, kernel in kernels for name in costs_of(kernel)]
    start = np.log([*shared.values(), *costs])
    names = [*shared, *(name for _, kernel in kernels for name in costs_of(kernel))]
    unbounded = [(math.exp(each - 3), math.exp(each + 3)) for each in start]
    lowest, highest = np.log([_BOUNDS.get(*each) for each in zip(names, unbounded, strict=True)]).T
    start = np.clip(start, lowest + 1e-6, highest - 1e-6)
    solution = least_squares(residuals, start, bounds=(lowest, highest))
    return unpack(solution.x)


def weight(record: dict[str, Any]) -> float:
    """Return the weight of one measurement in the fit."""
    if record["is_recommended"]:
        return 2.0
    # Tiles that alternate have only a few launches, which end before long kernels heat up the device. The times of long
    # kernels are therefore shorter than under sustained load, and the fit uses only the ratios of these times.
    return 1.0 if record["seconds"] < _BRIEF else 0.0


def turns(sample: Sample) -> tuple[Any, ...]:
    """Return a key that is equal for measurements that ran alternately."""
    return sample.record["is_recommended"], sample.pass_, sample.record["arguments"]


def costs_of(kernel: Kernel) -> tuple[str, ...]:
    """Return the names of a kernel's fitted coefficients."""
    return "outer_tile", "inner_tile", "masking", "power", *(("skipping",) if kernel.row_groups > 1 else ())


def predicted(every: list[Sample], model: Calibration) -> list[float]:
    """Return the predicted seconds of each sample.

    A prediction uses the kernel of ``model`` that has the same size and element types as the sample's kernel.
    """
    seconds = []
    for sample in every:
        if sample.kernel is None:
            q_tile, kv_tile = (tuple(sample.record[name][-sample.problem.rank :]) for name in ("q_tile", "kv_tile"))
            simulation = simulator.simulate(sample.problem, (q_tile, kv_tile), sample.pass_, calibration=model)
            assert simulation.seconds is not None
            seconds.append(simulation.seconds)
            continue
        wanted = sample.kernel.size, tuple(sample.kernel.dtypes)
        (kernel,) = (each for each in model.kernels[sample.pass_] if (each.size, tuple(each.dtypes)) == wanted)
        seconds.append(float(simulator.predict(sample.problem, sample.counts.tiles, sample.pass_, kernel, model)))
    return seconds


def print_errors(every: list[Sample], model: Calibration) -> None:
    """Print the predicted and the measured time of each sample, and the errors per set.

    For each problem with several tile pairs, also print a ratio of measured times if it exceeds 1: the time of the pair
    that the model predicts to be the fastest, divided by the shortest time.
    """
    ratios: dict[str, list[float]] = {}
    groups: dict[Any, list[tuple[float, float]]] = collections.defaultdict(list)
    for sample, seconds in zip(every, predicted(every, model), strict=True):
        groups[turns(sample)].append((seconds, sample.record["seconds"]))
        record = sample.record
        ratio = seconds / record["seconds"]
        name = f"{record['set']}, {record['pass']}" + ("" if record["is_recommended"] else ", in turns")
        ratios.setdefault(name, []).append(ratio)
        print(
            f"{name:34} {record['arguments']:58} {tuple(record['q_tile'])!s:12} {tuple(record['kv_tile'])!s:12}"
            f"{1e3 * record['seconds']:10.4f} ms, predicted {1e3 * seconds:10.4f} ms ({ratio - 1:+.1%})"
        )
    for name, values in ratios.items():
        errors = [abs(value - 1) for value in values]
        middle, largest = statistics.median(errors), max(errors)
        print(f"{name}: {len(values)} measurements, median error {middle:.1%}, largest error {largest:.1%}")
    costs = {
        f"{arguments} ({pass_})": min(times)[1] / min(measured for _, measured in times)
        for (is_recommended, pass_, arguments), times in groups.items()
        if not is_recommended and len(times) > 1
    }
    for line, cost in sorted(costs.items(), key=lambda item: -item[1]):
        if cost > 1:
            print(f"the model's tiles take {cost:.3f} times as long as the fastest ones measured in turns: {line}")
    print(f"the model's tiles are the fastest in {sum(cost == 1 for cost in costs.values())} of {len(costs)} problems")


def main() -> None:
    """Run the step of the command line: ``measure`` or ``fit``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = parser.add_subparsers(dest="step", required=True)
    measuring = steps.add_parser("measure", help="measure on the GPU")
    measuring.add_argument("--family", default="hopper")
    measuring.add_argument("--dtype", default=_OWN, help="element type, as in the profiler")
    measuring.add_argument("--passes", nargs="+", choices=PASSES, default=["forward"])
    measuring.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    measuring.add_argument(
        "--other-ranks", nargs="*", type=int, default=OTHER_RANKS, help="ranks of more tiles to measure for the fit"
    )
    measuring.add_argument("--warmup-steps", type=int, default=10)
    measuring.add_argument("--iterations", type=int, default=20)
    measuring.add_argument("--json", type=Path, required=True)
    fitting = steps.add_parser("fit", help="fit on any machine")
    fitting.add_argument("records", nargs="+", type=Path)
    fitting.add_argument("--family", default="hopper")
    fitting.add_argument("--dtype", default=_OWN, help="element type of the records")
    fitting.add_argument("--out", type=Path, help="path of the fitted model")
    fitting.add_argument("--records-out", type=Path, help="path of one file with the measurements of all records")
    options = parser.parse_args()
    if options.step == "measure":
        records, run_environment = [], environment()
        for pass_ in options.passes:
            for problem_records in measure(
                options.family,
                options.dtype,
                pass_,
                options.sets,
                options.other_ranks,
                options.warmup_steps,
                options.iterations,
            ):
                records += problem_records
                # Write after each problem, so that an interrupted run keeps its measurements.
                write_json(options.json, {"environment": run_environment, "records": records})
        return
    files = [json.loads(file.read_text(encoding="utf-8")) for file in options.records]
    model = simulator.calibration_for(options.family)
    assert model is not None
    records = [record for found in files for record in found["records"]]
    every = samples(records, model)
    model = fit(every, model, model.dtypes if options.dtype == _OWN else (ELEMENT_TYPES[options.dtype],))
    print_errors(every, model)
    if options.out is not None:
        write_json(options.out, dataclasses.asdict(model))
    if options.records_out is not None:
        write_json(options.records_out, {"environment": files[0]["environment"], "records": records})


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a model or measurements as JSON."""
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    command.run(main)
