"""Time problems with two builds of natten_jax alternately, for example a commit and its parent.

Each build is a clone with its libraries built in place. For each build, a separate process runs the problems with the
clone's own benchmark modules. The two processes alternate, so that both run at the same clock rate. A turn's time is
the median device time of 3 launches, after one untimed launch. Two ratios of the second build's time to the first
build's time are printed: the median of the ratios of all turns, and the ratio of the shortest times. A ratio above 1
means that the second build is slower.

Example:
    python bench/run.py compare_builds ../before . --problems 2d-w40 --small "NAT s1" --families none cutlass
    python bench/run.py compare_builds ../before . --small "NAT s1" --sides key_bias sinks
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

PASSES = ("forward", "backward")
SIDES = ("plain", "relative_bias", "key_bias", "sinks")
PAUSE = 0.05  # seconds of pause before each turn


class Problem(NamedTuple):
    """A problem that both builds run.

    Attributes:
        name: Name of a problem in bench/benchmarks.py or, if ``is_small``, of a row in bench/biases.py.
        is_small: True if ``name`` is the name of a row in bench/biases.py.
        family: Kernel family; ``"none"`` selects the default backend.
        side: Bias or sinks, as in bench/biases.py; ``"plain"`` for a call without biases and sinks.
    """

    name: str
    is_small: bool
    family: str
    side: str = "plain"


def serve(root: Path) -> None:
    """Answer requests with the build in ``root``.

    A request is a JSON line on standard input: a problem to prepare, or the name of a pass to time.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # All other output goes to standard error.
    # Some builds keep the shared modules directly in bench/, others in bench/lib/.
    sys.path[:0] = [str(root), str(root / "bench"), str(root / "bench" / "lib")]
    import jax
    import jax.numpy as jnp
    from benchmarks import BENCHMARKS
    from biases import ROWS, runner_of
    from implementations import ours  # type: ignore[import-not-found]
    from small import CACHE_BYTES
    from timing import Runner, compile_backward, compile_runner  # type: ignore[import-not-found]

    runners: dict[str, Runner] = {}
    filler = jnp.zeros((CACHE_BYTES // 4,), jnp.uint32)
    fill = jax.jit(lambda x: ~x)

    def draw(shape: Sequence[int], dtype: str, seed: int) -> jax.Array:
        return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)

    def prepare(problem: Problem) -> None:
        runners.clear()  # free the arrays of the previous problem
        if problem.is_small:
            row = next(row for row in ROWS if row.name == problem.name)
            for pass_ in PASSES:
                runner = runner_of(row, pass_, problem.side, problem.family)  # type: ignore[arg-type]
                if isinstance(runner, str):
                    raise ValueError(runner)
                runners[pass_] = runner
            return
        benchmark = BENCHMARKS[problem.name]
        family = None if problem.family == "none" else problem.family
        function, dtype, shapes = ours(benchmark, family), benchmark.dtype, [benchmark.shape] * 3
        if benchmark.additional_kv:
            shapes += [benchmark.additional_shape] * 2
        arrays = [draw(shape, dtype, seed) for seed, shape in enumerate(shapes)]
        runners["forward"] = compile_runner(function, *arrays, name="forward_pass")
        cotangent = draw(shapes[0], dtype, len(shapes))
        runners["backward"] = compile_backward(function, cotangent, *arrays, name="backward_pass")

    def seconds(pass_: str) -> float:
        runner = runners[pass_]
        jax.block_until_ready(fill(filler))
        jax.block_until_ready(runner.compiled(*runner.arguments))
        return statistics.median(runner.seconds(3))

    for line in sys.stdin:
        request = json.loads(line)
        try:
            if isinstance(request, str):
                answer: Any = seconds(request)
            else:
                prepare(Problem(*request))
                answer = None
        except Exception as error:
            answer = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        print(json.dumps(answer), file=answers, flush=True)


class Build:
    """A process that runs ``serve`` with a build."""

    def __init__(self, root: Path) -> None:
        environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONPATH": str(root)}
        command = [sys.executable, __file__, "--serve", str(root)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def ask(self, request: Any) -> None:
        """Send a request without waiting for its answer."""
        assert self._process.stdin is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)

    def answer(self) -> Any:
        """Wait for the answer to the most recent request, and return the answer."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a build's process ended: {' '.join(map(str, self._process.args))}")  # type: ignore[arg-type]
        return json.loads(line)


def compare(
    builds: tuple[Build, Build], problem: Problem, passes: Sequence[str], turns: int
) -> Iterator[dict[str, Any]]:
    """Run both builds alternately; yield their times and the ratios of these times for each pass."""
    for build in builds:
        build.ask(problem)
    errors = [answer for build in builds if (answer := build.answer()) is not None]
    if errors:
        yield {**problem._asdict(), "error": errors}
        return
    for pass_ in passes:
        times: tuple[list[float], list[float]] = [], []
        for turn in range(turns):
            for side in (0, 1) if turn % 2 == 0 else (1, 0):
                time.sleep(PAUSE)
                builds[side].ask(pass_)
                answer = builds[side].answer()
                if isinstance(answer, str):
                    yield {**problem._asdict(), "error": [answer]}
                    return
                times[side].append(answer)
        ratio = statistics.median(second / first for first, second in zip(*times, strict=True))
        yield {
            **problem._asdict(),
            "pass": pass_,
            "seconds": times,
            "ratio": ratio,
            "ratio of the shortest": min(times[1]) / min(times[0]),
        }


def main() -> None:
    """Measure the selected problems with both builds, print a line per problem and pass, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("builds", nargs=2, type=Path, metavar="CLONE", help="clones to compare: before, after")
    parser.add_argument("--problems", nargs="+", default=[], metavar="NAME", help="problems of bench/benchmarks.py")
    parser.add_argument("--small", nargs="+", default=[], metavar="NAME", help="rows of bench/biases.py")
    parser.add_argument(
        "--sides", nargs="+", default=["plain"], choices=SIDES, help="sides of the rows of bench/biases.py"
    )
    parser.add_argument("--families", nargs="+", default=["none"], help="none: the default backend")
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=list(PASSES))
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    builds = Build(options.builds[0].resolve()), Build(options.builds[1].resolve())
    names = [(name, False, "plain") for name in options.problems]
    names += [(name, True, side) for side in options.sides for name in options.small]
    results = []
    for family in options.families:
        for name, is_small, side in names:
            for row in compare(builds, Problem(name, is_small, family, side), options.passes, options.turns):
                results.append(row)
                if options.json is not None:
                    options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
                if "error" in row:
                    print(f"{name:20} {family:8} {side:13} {row['error']}", flush=True)
                    continue
                before, after = (min(times) * 1e6 for times in row["seconds"])
                print(
                    f"{name:20} {family:8} {side:13} {row['pass']:8} {before:10.1f} {after:10.1f} us"
                    f"   {row['ratio']:.4f} {row['ratio of the shortest']:.4f}",
                    flush=True,
                )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(Path(sys.argv[2]))
    else:
        main()
