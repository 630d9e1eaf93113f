"""The profiler's command line, read, checked, and with its defaults filled in."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from natten_jax.profiler.baselines import BASELINES
from natten_jax.profiler.cli import checks
from natten_jax.profiler.cli.flags import PERFORMANCE_FLAGS, TILE_FLAGS, profiler_parser
from natten_jax.profiler.cli.parser import Parser, flag
from natten_jax.profiler.options import WINDOW_FLAGS, Options, whole_windows
from natten_jax.windows import WindowArguments

#: Flags that take one value for all dimensions, too.
_REPEATED = (*WINDOW_FLAGS, "backward_kv_splits")


def parse(argv: Sequence[str] | None = None) -> Options:
    """Read the command line; a usage error prints one sentence and exits with status 2."""
    parser = profiler_parser()
    given = parser.parse_args(argv)
    rank = len(given.input_size)
    if rank > 3:
        parser.error(f"-i/--input-size takes 1 to 3 integers, one per token dimension, got {rank}")
    for name in (*_REPEATED, *TILE_FLAGS):
        setattr(given, name, _per_dimension(parser, given, name))
    checks.check_modes(parser, given)
    checks.check_backends(parser, given)
    if given.backend in BASELINES:
        checks.check_baseline(parser, given)
    layout = tuple(given.input_size)
    values: dict[str, Any] = {**vars(given), "input_size": layout}
    values["heads_kv"] = given.heads_kv or given.heads
    values["dim_value"] = given.dim_value or given.dim
    whole = zip(WINDOW_FLAGS, whole_windows(layout), strict=True)
    values["window"] = WindowArguments._make(values.pop(name) or default for name, default in whole)
    performance = checks.checked_performance(
        parser, rank, **{field: values.pop(name) for name, field in PERFORMANCE_FLAGS.items()}
    )
    options = Options(**values, performance=performance)
    checks.check_problem(parser, options)
    checks.check_split(parser, options)
    checks.check_outputs(parser, given)
    return options


def _per_dimension(parser: Parser, given: argparse.Namespace, name: str) -> tuple[Any, ...] | None:
    """What a flag was given, with a value for each dimension; ``None`` where it was left out."""
    values = getattr(given, name)
    if values is None:
        return None
    rank = len(given.input_size)
    if len(values) == 1 and name in _REPEATED:
        return tuple(values) * rank
    if len(values) != rank:
        alternative = "or one for all, " if name in _REPEATED else ""
        parser.error(
            f"{flag(name)} takes {rank} value(s), {alternative}one per dimension of the input size "
            f"{' '.join(map(str, given.input_size))}, got {len(values)}"
        )
    return tuple(values)
