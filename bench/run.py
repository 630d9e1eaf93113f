"""Run a suite of this folder: ``python bench/run.py SUITE [OPTIONS]``. Without a suite, list all suites.

Each suite is a separate program; ``python bench/run.py SUITE --help`` lists its options.

Example:
    python bench/run.py peers --problems 2d 2d-s16 --json results.json
    python bench/run.py small --json small.json
"""

from __future__ import annotations

import ast
import runpy
import sys
from pathlib import Path

FOLDER = Path(__file__).parent

#: Suites that time kernels, or that compare the kernels of two builds.
KERNELS = (
    "peers",
    "beside_cudnn",
    "small",
    "biases",
    "layouts",
    "fp8",
    "cpu_kernels",
    "landscape",
    "compare_builds",
    "compare_bits",
)
#: Suites that time programs: all implementations on a fixed list of problems; programs on several devices; kernels that
#: are optimized step by step; and first calls.
PROGRAMS = ("board", "scaling", "several_devices", "part_tiles", "fmha_scaling", "fmha_report", "first_call")
#: Suites that measure accuracy and host costs, check the profiler, fit the time model, tune configurations, and count
#: instructions of TPU kernels.
OTHERS = ("fp8_accuracy", "python_calls", "profiler_agreement", "calibrate", "tune_models", "tpu_bundles")
SUITES = KERNELS + PROGRAMS + OTHERS


def path_of(suite: str) -> Path:
    return FOLDER / f"{suite}.py"


def listing() -> str:
    """Format a line for each suite with the first line of its docstring."""
    lines = []
    for suite in SUITES:
        text = ast.get_docstring(ast.parse(path_of(suite).read_text(encoding="utf-8"))) or ""
        lines.append(f"  {suite:<20}{text.splitlines()[0]}")
    return "\n".join(lines)


def main() -> None:
    suite = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if suite in ("-h", "--help"):
        print(f"{__doc__}\nSuites:\n{listing()}")
        return
    if suite not in SUITES:
        sys.exit(f"bench/run.py: there is no suite {suite!r}; the suites are {', '.join(SUITES)}")
    sys.argv[:2] = [str(path_of(suite))]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
