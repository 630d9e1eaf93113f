"""Draws how many times as long as a copy of their bytes problems with small windows take, from a record of small.py.

Example:
    python bench/plot_small.py bench/results/h200/small.json docs/images/small_windows.svg
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lib import command
from lib.charts import dots, save, style

from natten_jax.performance import PASSES

#: Sides that are drawn, under the names that the picture has for them.
SIDES = {"natten_jax": "natten_jax", "cutlass-large": "kernels for large windows", "cudnn": "cuDNN, dense"}
#: What rows are called in the picture.
NAMES = {
    **{f"NAT s{stage}": f"NAT, stage {stage}" for stage in range(1, 5)},
    "DiNAT s1": "DiNAT, stage 1",
    "HDiT 64": "HDiT, 64x64",
    "HDiT 256": "HDiT, 256x256",
    "k3": "window 3x3",
    "k13 D64": "window 13x13,\nheads of 64",
    "k13 D32": "window 13x13,\nheads of 32",
    "clips": "video 8x56x56",
    "volume": "volume 64x64x64",
    "1-D causal": "sequence, causal",
    "tiny 1-D": "256 tokens",
    "tiny 2-D": "image 16x16",
}
_TICKS = 1, 2, 4, 8, 16, 32


def draw(record: dict[str, Any], path: Path) -> None:
    """One dot for each side of each problem and pass."""
    names = list(dict.fromkeys(each["row"] for each in record["records"]))
    found = {(each["row"], each["pass"]): each["sides"] for each in record["records"]}
    times = {
        f"{pass_} pass": {
            label: {
                row: figures["times copy"]
                for row, name in enumerate(names)
                if isinstance(figures := found.get((name, pass_), {}).get(side), dict)
            }
            for side, label in SIDES.items()
        }
        for pass_ in PASSES
    }
    about = "times as long as a copy of the same bytes: lower is better\n"
    about += f"{record['environment']['device']}, bfloat16"
    with style():
        save(dots([NAMES.get(name, name) for name in names], times, about, _TICKS, unit="", row_height=0.36), path)


def main() -> None:
    """Draw one record."""
    command.draw_record(__doc__, draw)


if __name__ == "__main__":
    command.run(main)
