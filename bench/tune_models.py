"""Tune the attention of published models, and write the package's tables of configurations.

The forward and the backward pass of each problem in ``bench/models.py`` are tuned. The measurements of the candidate
configurations and of the default configuration alternate. A candidate is kept if its median time is more than 2% faster
than the default's, and the 75th percentile of its times is below the 25th percentile of the default's times.

Two tables are written after every problem. The results table of the device has all measured passes, including those
that keep the default. The package's table of the device has only the candidates that are kept. With another folder as
``--out``, only the results table is written. Problems that are already in the results table are skipped, so that
several short runs produce one table.

Example:
    python bench/run.py tune_models --limit 150
    python bench/run.py tune_models --models Wan HDiT --again --out build/tuned
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lib import command
from lib.environment import environment
from models import MODEL_PROBLEMS, ModelProblem

from natten_jax.autotuning.tables import TunedPass, TunedTable
from natten_jax.plan.devices import default_device
from natten_jax.profiler.search import Effort, Task, tuned_passes

_ROOT = Path(__file__).parents[1]
MEASURED = _ROOT / "bench" / "results" / "tuned"
PACKAGE = _ROOT / "natten_jax" / "autotuning" / "measured"
#: Limits of a search. They are lower than the defaults, because there are many problems.
EFFORT = Effort(screened=24, finalists=4, seconds=2.5)


def file_name(device: str) -> str:
    """Return the file name of a device's table."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") + ".json"


def present(device: str, folders: Iterable[Path]) -> list[TunedPass]:
    """Return the passes in the device's table, from the first folder that has this table, or an empty list."""
    for folder in folders:
        path = folder / file_name(device)
        if path.exists():
            return list(TunedTable.from_text(path.read_text(encoding="utf-8")).passes)
    return []


def write(passes: Sequence[TunedPass], device: str, path: Path) -> None:
    """Write a table, with the environment of the measurements."""
    facts: dict[str, Any] = {"environment": environment(), **TunedTable(device, tuple(passes)).to_json()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def row(tuned: TunedPass) -> str:
    """Format a line of the printed table."""
    passes = "forward" if tuned.plan.pass_ == "forward" else "both passes"
    gain = "default kept" if tuned.is_default else f"{tuned.default_seconds / tuned.seconds:.2f} times as fast"
    times = f"{1e3 * tuned.default_seconds:9.4f} ms {1e3 * tuned.seconds:9.4f} ms"
    return f"  {passes:12}{times}  {gain}: {tuned.plan.backend} {tuned.plan.tiles[0]} {tuned.plan.tiles[1]}"


def task_of(problem: ModelProblem, backprop: bool = True) -> Task:
    """Return the tuning task of a problem."""
    return Task(problem.benchmark.problem, backprop, label=problem.label)


def chosen_problems(names: Sequence[str], done: Sequence[TunedPass], again: bool) -> list[ModelProblem]:
    """Return the problems whose labels contain one of ``names``, or all problems if ``names`` is empty.

    Problems whose passes are in ``done`` are left out, unless ``again`` is true.
    """
    finished = set() if again else {each.plan.problem for each in done}
    return [
        each
        for each in MODEL_PROBLEMS
        if (not names or any(name.lower() in each.label.lower() for name in names))
        and task_of(each).planned_problem not in finished
    ]


def main() -> int:
    """Tune the selected problems, print and save the tables; return 1 if a problem could not be measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="+", default=[], metavar="NAME", help="select problems whose labels contain a name"
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=math.inf,
        metavar="SECONDS",
        help="time limit; the first problem always runs",
    )
    parser.add_argument("--again", action="store_true", help="also measure problems that are in the table")
    parser.add_argument("--forward-only", action="store_true", help="skip backward passes")
    parser.add_argument("--out", type=Path, default=MEASURED, metavar="FOLDER", help="folder of the table")
    options = parser.parse_args()
    start, longest, failures = time.monotonic(), 0.0, 0
    device = default_device().kind
    path = options.out / file_name(device)
    passes = present(device, (options.out, MEASURED))
    problems = chosen_problems(options.models, passes, options.again)
    print(f"{device}: {len(problems)} problems to measure, {len(passes)} passes in the table", flush=True)
    for number, problem in enumerate(problems):
        elapsed = time.monotonic() - start
        if number and elapsed + longest > options.limit:
            print(f"{len(problems) - number} problems are left; run the same command to continue", flush=True)
            break
        print(f"{elapsed:5.0f} s  {number + 1}/{len(problems)}  {problem.label}", flush=True)
        try:
            found = tuned_passes(task_of(problem, not options.forward_only), EFFORT)
        except Exception as error:  # continue with the other problems
            failures += 1
            print(f"  not measured: {type(error).__name__}: {' '.join(str(error).split())[:300]}", flush=True)
            continue
        finally:
            longest = max(longest, time.monotonic() - start - elapsed)
        replaced = {(each.plan.problem, each.plan.pass_) for each in found}
        passes = [each for each in passes if (each.plan.problem, each.plan.pass_) not in replaced]
        passes += found
        write(passes, device, path)
        if options.out == MEASURED:
            write([each for each in passes if not each.is_default], device, PACKAGE / file_name(device))
        print("\n".join(map(row, found)), flush=True)
    kept = sum(not each.is_default for each in passes)
    print(f"{path}: {len(passes)} passes, {kept} of which have another configuration than the default", flush=True)
    return int(failures > 0)


if __name__ == "__main__":
    command.run(main)
