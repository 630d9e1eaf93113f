"""Measure how the time of attention depends on the sequence length, and the speed-up of each optimisation.

The program times a ladder: a list of kernels, called steps. Each step adds an optimisation to the previous step. Every
step is checked against float64 attention before it is timed. A failed step is reported and skipped; if the baseline
fails, no speed-ups are computed. A step's time is the median device time of ``--iterations`` launches, after 10 untimed
launches. The steps alternate. A step's speed-up is the median over turns of the ratio of the baseline's time to the
step's time.

On an NVIDIA GPU, the first kernel of the ladder is a basic tensor-core kernel and the last is the production kernel.
cuDNN and JAX's Pallas kernel are also timed, for comparison. Steps 1 to 3 have tiles for the generation of the GPU.
They need a build with ``NATTEN_JAX_BENCH=1``, which ``make bench-scaling`` makes. On other platforms, the steps are
dense XLA, flex-fmha and cpu-fmha.

The default problem depends on the device. On a GPU, it is causal attention in float16 with 4 batch entries, 32 heads,
head_dim 128, and 1024 to 16384 tokens.

Example:
    python bench/run.py fmha_scaling --seq-lens 256 512 --output-dir results
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from benchmarks import Benchmark
from fmha.insights import insights, priorities
from fmha.ladder import BOUNDS, Ladder, error_of, ladder_of, tiles_of
from fmha.platforms import target_table
from fmha.results import LengthResult, StepResult, exact_flops, nominal_flops
from fmha.tables import impact_table, length_table, speedup_text, summary_table
from fmha.targets import TARGETS
from fmha_report import configuration_lines, draw, markdown, platform_lines, title_of
from lib import command
from lib.environment import environment
from lib.timing import Runner, compile_runner, ratio

from natten_jax.plan.devices import Device, default_device, default_jax_device

TURNS = 3
WARM_UP_LAUNCHES = 10
ITERATIONS = 100


@dataclasses.dataclass(frozen=True)
class Defaults:
    """Default problem of a platform; options of the command line replace its fields."""

    batch: int
    heads: int
    dim: int
    dtype: str
    seq_lens: tuple[int, ...]
    matrix_extent: int


GPU_DEFAULTS = Defaults(4, 32, 128, "float16", (1024, 2048, 4096, 8192, 16384), 8192)
CPU_DEFAULTS = Defaults(1, 4, 64, "float32", (256, 512, 1024, 2048), 1024)


class Log:
    """A log that prints lines and keeps them for the log file."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, *lines: str) -> None:
        """Print lines."""
        for line in lines:
            print(line, flush=True)
            self.lines.append(line)

    def section(self, title: str) -> None:
        """Print a heading."""
        self.add("", "=" * 80, f" {title}", "=" * 80)

    def subsection(self, title: str) -> None:
        """Print a second-level heading."""
        self.add("", "-" * 60, f" {title}", "-" * 60)


def draw_arrays(benchmark: Benchmark) -> tuple[jax.Array, ...]:
    """Return random normal query, key and value."""
    keys = jax.random.split(jax.random.key(0), 3)
    return tuple(jax.random.normal(key, benchmark.shape, benchmark.dtype) for key in keys)


def matrix_tflops(dtype: str, extent: int, iterations: int) -> float:
    """Return the rate of XLA's product of two random square matrices, in TFLOP/s."""
    keys = jax.random.split(jax.random.key(1), 2)
    matrices = (jax.random.normal(key, (extent, extent), dtype) for key in keys)
    seconds = compile_runner(lambda a, b: a @ b, *matrices).seconds(iterations)
    return 2 * extent**3 / statistics.median(seconds) / 1e12


def launches_of_turns(iterations: int) -> list[int]:
    """Return the number of launches in each turn of a step."""
    turns = min(TURNS, iterations)
    return [iterations // turns + (turn < iterations % turns) for turn in range(turns)]


def measure(benchmark: Benchmark, ladder: Ladder, iterations: int) -> LengthResult:
    """Check and time every step of the ladder at one sequence length."""
    arrays = draw_arrays(benchmark)
    exact, nominal = exact_flops(benchmark), nominal_flops(benchmark)
    runners: dict[str, Runner] = {}
    errors: dict[str, float] = {}
    failures: dict[str, str] = {}
    for step in ladder.steps:
        try:
            runner = compile_runner(step.make(benchmark), *arrays)
            errors[step.label] = error_of(runner.compiled(*arrays), arrays, benchmark.is_causal)
            bound = BOUNDS[benchmark.dtype]
            if not errors[step.label] <= bound:
                raise ValueError(f"its relative error is {errors[step.label]:.1e}, but must be at most {bound:.0e}")
            runners[step.label] = runner
        except Exception as error:
            failures[step.label] = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    times: dict[str, list[list[float]]] = {label: [] for label in runners}
    for runner in runners.values():
        runner.launch(WARM_UP_LAUNCHES)
    for launches in launches_of_turns(iterations):
        for label, runner in runners.items():
            times[label].append(runner.seconds(launches))
    turns = {label: [statistics.median(turn) for turn in each] for label, each in times.items()}
    results = []
    for step in ladder.steps:
        if step.label in times:
            seconds = statistics.median(second for turn in times[step.label] for second in turn)
            baseline = turns.get(ladder.baseline.label)
            results.append(
                StepResult(
                    step.label,
                    step.name,
                    1e3 * seconds,
                    exact / seconds / 1e12,
                    ratio(baseline, turns[step.label]) if baseline else None,
                    errors[step.label],
                    nominal / seconds / 1e12,
                )
            )
    return LengthResult(benchmark.tokens, tuple(results), failures)


def introduce(log: Log, device: Device, ladder: Ladder, configuration: dict[str, Any]) -> None:
    """Print the configuration of the run."""
    log.section("FMHA SCALING ANALYSIS")
    log.add(*configuration_lines(configuration))
    log.subsection("TARGET CONFIGURATIONS")
    log.add(*target_table())
    if device.compute_capability is not None:
        log.add("", "This device: {platform}, tiles of {tile_m} x {tile_n}".format(**configuration))
    log.section("OPTIMISATION STEPS")
    for step in ladder.steps:
        log.add("", f"Step {step.label}: {step.name}", *(f"  - {feature}" for feature in step.features))


def _benchmark(options: argparse.Namespace, tokens: int) -> Benchmark:
    return Benchmark(
        (tokens,), options.heads, options.dim, is_causal=options.causal, batch=options.batch, dtype=options.dtype
    )


def run(options: argparse.Namespace) -> int:
    """Measure every sequence length, print and save the figures; return 1 if no step could be measured."""
    device = default_device()
    ladder = ladder_of(device)
    defaults = GPU_DEFAULTS if device.platform == "cuda" else CPU_DEFAULTS
    for field in dataclasses.fields(defaults):
        if getattr(options, field.name, None) is None:
            setattr(options, field.name, getattr(defaults, field.name))
    longest = _benchmark(options, max(options.seq_lens))
    configuration = {
        "device": default_jax_device().device_kind,
        **tiles_of(longest, device),
        "batch": options.batch,
        "heads": options.heads,
        "head_dim": options.dim,
        "dtype": options.dtype,
        "causal": options.causal,
        "seq_lens": list(options.seq_lens),
        "iterations": options.iterations,
        "warm_up": WARM_UP_LAUNCHES,
    }
    log = Log()
    introduce(log, device, ladder, configuration)
    rate = matrix_tflops(options.dtype, options.matrix_extent, options.iterations)
    log.add("", f"Matrix product of {options.matrix_extent} x {options.matrix_extent}: {rate:.3g} TFLOP/s")

    results = []
    for tokens in options.seq_lens:
        benchmark = _benchmark(options, tokens)
        log.subsection(f"Sequence length: {tokens}")
        exact, nominal = exact_flops(benchmark) / 1e9, nominal_flops(benchmark) / 1e9
        log.add("", f"Operations: {exact:.5g} GFLOP exact (unmasked pairs), {nominal:.5g} nominal")
        result = measure(benchmark, ladder, options.iterations)
        results.append(result)
        log.add("", *length_table(result))
        log.add(*(f"[ERROR] Step {label} failed: {reason}" for label, reason in result.failures.items()))
        if result.best is not None:
            best = result.best
            log.add("", f"Best: step {best.step} ({best.name}), {speedup_text(best.speedup_vs_baseline)} the baseline")

    log.section("SCALING SUMMARY")
    log.add("", "## Performance by sequence length", "", *summary_table(ladder, results))
    log.add("", "## Optimisation impact by sequence length", "", *impact_table(ladder, results))
    log.section("PLATFORMS")
    log.add("", *platform_lines(ladder, configuration, results, rate))
    log.section("KEY INSIGHTS")
    lines = insights(ladder, results, rate)
    log.add("", *(f"- {line}" for line in lines))
    log.section("WHAT TO OPTIMISE AT WHICH SIZE")
    log.add("", *(f"- {line}" for line in priorities(ladder, results)))
    save(options.output_dir, log, configuration, ladder, results, rate, lines)
    return int(not any(result.steps for result in results))


def save(
    folder: Path,
    log: Log,
    configuration: dict[str, Any],
    ladder: Ladder,
    results: Sequence[LengthResult],
    rate: float,
    lines: Sequence[str],
) -> None:
    """Write the figures as JSON, the Markdown report, the log and the plot."""
    folder.mkdir(parents=True, exist_ok=True)
    data = {
        "environment": environment(),
        "config": configuration,
        "targets": [dataclasses.asdict(target) for target in TARGETS],
        "matrix_tflops": rate,
        "results": [
            {
                **dataclasses.asdict(result),
                "best_step": result.best and result.best.step,
                "best_speedup": result.best and result.best.speedup_vs_baseline,
            }
            for result in results
        ],
        "insights": list(lines),
        "priorities": priorities(ladder, results),
    }
    (folder / "fmha_scaling_results.json").write_text(
        json.dumps(data, indent=2, allow_nan=False) + "\n", encoding="utf-8"
    )
    (folder / "fmha_scaling_results.md").write_text(markdown(configuration, ladder, results, rate), encoding="utf-8")
    draw(title_of(configuration), ladder, results, rate, folder / "fmha_scaling.png")
    files = [folder / f"fmha_scaling{suffix}" for suffix in ("_results.json", "_results.md", "_log.txt", ".png")]
    log.add("", "Results:", *(f"  {file}" for file in files))
    (folder / "fmha_scaling_log.txt").write_text("\n".join(log.lines) + "\n", encoding="utf-8")


def positive(text: str) -> int:
    """Parse a command-line integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _defaults(field: str) -> str:
    gpu, cpu = (
        " ".join(map(str, value)) if isinstance(value := getattr(defaults, field), tuple) else value
        for defaults in (GPU_DEFAULTS, CPU_DEFAULTS)
    )
    return f"(default: {gpu} on a GPU, {cpu} elsewhere)"


def main() -> int:
    """Run the benchmark with the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=positive, metavar="N", help=f"batch entries {_defaults('batch')}")
    parser.add_argument("--heads", type=positive, metavar="N", help=f"heads {_defaults('heads')}")
    parser.add_argument("--dim", type=positive, metavar="N", help=f"head_dim {_defaults('dim')}")
    parser.add_argument("--dtype", choices=BOUNDS, help=f"element type {_defaults('dtype')}")
    parser.add_argument("--no-causal", dest="causal", action="store_false", help="use full attention")
    parser.add_argument(
        "--seq-lens", nargs="+", type=positive, metavar="TOKENS", help=f"lengths {_defaults('seq_lens')}"
    )
    parser.add_argument(
        "--iterations",
        type=positive,
        default=ITERATIONS,
        metavar="N",
        help=f"timed launches of each step at each length (default: {ITERATIONS})",
    )
    parser.add_argument(
        "--output-dir", type=Path, default=Path(), help="directory of the results (default: the current one)"
    )
    return run(parser.parse_args())


if __name__ == "__main__":
    command.run(main)
