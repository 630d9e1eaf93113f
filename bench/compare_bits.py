"""Compare results of two builds of natten_jax bit for bit, for example a commit and its parent.

Each build is a clone with its libraries built in place. For each build, a process draws random problems with the
clone's own fuzzer, runs both passes, and prints a digest of every result. All processes draw the same problems. The
first build runs twice. Results that differ between its two runs, such as sums of atomic additions, are counted but not
compared with the second build.

Example:
    python bench/run.py compare_bits ../before . --backend hopper --problems 100
    python bench/run.py compare_bits ../before . --backend cutlass --direct --problems 400 --seed 7
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: Digests of a problem's results, by name.
Digests = dict[str, str]


def serve(root: Path, arguments: Sequence[str]) -> None:
    """Print a JSON line for each problem: its number, its description and the digests of its results."""
    sys.path.insert(0, str(root))
    from tests.fuzz.execution import run
    from tests.fuzz.options import parse
    from tests.fuzz.session import problems_of

    options = parse(list(arguments))
    if options.problems is None:
        raise SystemExit("--problems is required, because both builds must run the same problems")
    for batch in range(-(-options.problems // options.at_once)):
        numbered = problems_of(options, batch)
        for (number, problem), results in zip(numbered, run([each for _, each in numbered]), strict=True):
            print(json.dumps([number, str(problem), digests(*results)]), flush=True)


def digests(outputs: Any, gradients: Any) -> Digests:
    """Return the digests of outputs and gradients, by name."""
    named = {**dict(zip(("out", "logsumexp"), outputs, strict=True)), **gradients._asdict()}
    return {
        name: hashlib.sha256(array.tobytes()).hexdigest()[:16] for name, array in named.items() if array is not None
    }


def start(root: Path, arguments: Sequence[str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONPATH": str(root)}
    command = [sys.executable, __file__, "--serve", str(root), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=root)


def answers(process: subprocess.Popen[str]) -> list[tuple[int, str, Digests]]:
    """Wait for a process and return its parsed lines: number, description and digests of each problem."""
    lines, _ = process.communicate()
    if process.returncode != 0:
        raise SystemExit(f"a build's process ended with status {process.returncode}")
    return [tuple(json.loads(line)) for line in lines.splitlines()]


def main() -> int:
    """Run both builds and print the problems whose results differ; return 1 if any results differ, otherwise 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("builds", nargs=2, type=Path, metavar="CLONE", help="clones to compare: before, after")
    options, arguments = parser.parse_known_args()  # the remaining arguments are options of the fuzzer
    before, after = (build.resolve() for build in options.builds)
    processes = [start(root, arguments) for root in (before, before, after)]
    first, again, second = map(answers, processes)
    compared = varying = 0
    different = []
    for (number, problem, expected), (*_, repeated), (_, other, found) in zip(first, again, second, strict=True):
        if problem != other:
            raise SystemExit(f"the builds draw different problems: {problem} and {other}")
        stable = {name for name, digest in expected.items() if repeated[name] == digest}
        compared, varying = compared + len(stable), varying + len(expected) - len(stable)
        names = sorted(name for name in stable if found.get(name) != expected[name])
        if names:
            different.append(number)
            print(f"{number}: {', '.join(names)} differ: {problem}")
    print(
        f"{len(first)} problems, {compared} results compared, {varying} vary from run to run, {len(different)} differ"
    )
    return 1 if different else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(Path(sys.argv[2]), sys.argv[3:])
    else:
        sys.exit(main())
