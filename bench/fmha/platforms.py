"""Tables for reports: tiles and thread blocks of each GPU generation, and the best measured rates of each device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fmha.ladder import Ladder
from fmha.results import LengthResult, read
from fmha.tables import table
from fmha.targets import TARGETS

_RECORDED = Path(__file__).parents[1] / "results"


def target_table() -> list[str]:
    """Format a table with the tiles and the occupancy of each target."""
    rows = (
        (target.name, *map(str, (target.tile_m, target.tile_n, target.ctas, target.occupancy))) for target in TARGETS
    )
    return table(("Target", "Tile M", "Tile N", "CTAs", "Occupancy"), rows)


def work_table(configuration: Mapping[str, Any]) -> list[str]:
    """Format a table with the number of thread blocks and the number of key tiles for each target.

    The numbers are given for the first and the last sequence length of a run.
    """
    lengths = sorted({configuration["seq_lens"][0], configuration["seq_lens"][-1]})
    heads = configuration["batch"] * configuration["heads"]
    rows = [
        (
            target.name,
            *(str(heads * math.ceil(length / target.tile_m)) for length in lengths),
            *(str(math.ceil(length / target.tile_n)) for length in lengths),
        )
        for target in TARGETS
    ]
    header = [f"CTAs at {length}" for length in lengths] + [f"KV tiles, at most, at {length}" for length in lengths]
    return table(("Target", *header), rows)


def measured_table(
    ladder: Ladder, configuration: Mapping[str, Any], results: Sequence[LengthResult], rate: float
) -> list[str]:
    """Format a table with the best rate of the production kernel on each device.

    The first row is this run. The other rows are earlier records of the same problem on other devices.
    """
    runs = {configuration["device"]: (results, rate)}
    for path in sorted(_RECORDED.glob("*/fmha_scaling/fmha_scaling_results.json")):
        other, other_results, other_rate = read(path)
        if _problem(other) == _problem(configuration):
            runs.setdefault(other["device"], (other_results, other_rate))
    rows = []
    for device, (device_results, matrix_rate) in runs.items():
        found = [(step, result.seq_len) for result in device_results if (step := result.find(ladder.production))]
        if found:
            best, length = max(found, key=lambda each: each[0].tflops)
            share = f"{best.tflops / matrix_rate:.0%}"
            rows.append((device, f"{matrix_rate:.3g}", f"{best.tflops:.3g}", share, str(length)))
    return table(("Device", "Matrix product (TFLOP/s)", "Production, fastest", "Share", "Tokens"), rows)


def _problem(configuration: Mapping[str, Any]) -> list[Any]:
    return [configuration[name] for name in ("batch", "heads", "head_dim", "dtype", "causal")]
