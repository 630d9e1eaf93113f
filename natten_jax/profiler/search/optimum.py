"""What a search found: its trials, the best configuration, and how they are shown and saved."""

from __future__ import annotations

import dataclasses
from typing import Any

from natten_jax.performance import Performance
from natten_jax.profiler.options import Options
from natten_jax.profiler.report.tables import Table
from natten_jax.profiler.run.workload import passes
from natten_jax.profiler.search.configurations import tile_text


@dataclasses.dataclass(frozen=True)
class Trial:
    """A configuration and what became of it.

    Attributes:
        options: The configuration.
        seconds: Device time, median of the runs; ``None`` where it failed.
        error: Why it failed.
    """

    options: Options
    seconds: float | None
    error: str = ""


@dataclasses.dataclass(frozen=True)
class Optimum:
    """The best configuration that was found.

    Attributes:
        options: The options with it filled in.
        seconds: Its device time.
        default_seconds: Device time of what runs without any choice; ``None`` where that failed.
        trials: Every measurement, in order.
        wall_seconds: How long the search took, of which ``compile_seconds`` were compilation.
        compile_seconds: Seconds of compilation.
        is_complete: Whether the search came to its end and was not interrupted.
    """

    options: Options
    seconds: float
    default_seconds: float | None
    trials: tuple[Trial, ...]
    wall_seconds: float
    compile_seconds: float
    is_complete: bool = True

    @property
    def failures(self) -> list[Trial]:
        """The configurations that failed."""
        return [trial for trial in self.trials if trial.seconds is None]


def configuration(options: Options) -> dict[str, Any]:
    """The performance arguments of an operator, as :func:`natten_jax.load_tuned` returns them."""
    fmha = {} if options.fmha_backend is None else {"attention_kwargs": {"backend": options.fmha_backend}}
    backend = {} if options.backend is None else {"backend": options.backend}
    chosen, default = dataclasses.asdict(options.performance), Performance()
    return {**backend, **fmha, **{name: each for name, each in chosen.items() if each != getattr(default, name)}}


def best_table(optimum: Optimum) -> Table:
    """The best configuration."""
    rows = []
    for name, value in configuration(optimum.options).items():
        if name == "attention_kwargs":
            name, value = "fmha_backend", value["backend"]
        rows.append((name, tile_text(value) if isinstance(value, tuple) else str(value)))
    return Table("Best configuration", ("Parameter", "Value"), tuple(rows))


def search_json(optimum: Optimum) -> dict[str, Any]:
    """How the search went, and every trial, as JSON values."""
    facts = ("default_seconds", "wall_seconds", "compile_seconds", "is_complete")
    return {
        "best_seconds": optimum.seconds,
        **{name: getattr(optimum, name) for name in facts},
        "trials": [
            {**configuration(run.options), "passes": passes(run.options), "seconds": run.seconds, "error": run.error}
            for run in optimum.trials
        ],
    }
