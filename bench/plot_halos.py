"""Draws what two devices do in a pass whose tokens are split over them, from a record of several_devices.py.

Example:
    python bench/plot_halos.py bench/results/h200x2/timeline.json docs/images/halo_trace.svg
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lib import command
from lib.charts import COLORS, save
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

EXCHANGE = "#f2b56b"
KINDS = {"kernels of attention": COLORS[0], "copies and merging": COLORS[1], "exchange": EXCHANGE}


def kind_of(event: dict[str, Any]) -> str:
    """What an event is drawn as."""
    if event["is exchange"]:
        return "exchange"
    return "kernels of attention" if "natten_jax" in event["symbol"] else "copies and merging"


def draw(axes: Axes, events: Sequence[dict[str, Any]], first: float, last: float) -> None:
    """Two lanes for each device, of what lies between two times in milliseconds."""
    for event in events:
        start, end = max(event["start"], first), min(event["start"] + event["milliseconds"], last)
        if start < end:
            lane = 2 * event["device"] + event["is exchange"]
            axes.barh(lane, end - start, left=start, height=0.8, color=KINDS[kind_of(event)])
    axes.set_xlim(first, last)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_xlabel("milliseconds", fontsize="small")


def main() -> None:
    """Draw the whole pass, and its start."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--row", help="of the record; the first one, unless named")
    options = parser.parse_args()
    results = json.loads(options.record.read_text(encoding="utf-8"))["results"]
    name = options.row or next(iter(results))
    events = results[name]["timeline"]
    end = max(event["start"] + event["milliseconds"] for event in events)
    figure = Figure(figsize=(11, 2.4), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    draw(axes[0], events, 0.0, end)
    draw(axes[1], events, 0.0, 0.12 * end)
    devices = sorted({event["device"] for event in events})
    lanes = [f"device {device}{what}" for device in devices for what in ("", ": exchange")]
    axes[0].set_yticks(range(len(lanes)), lanes)
    axes[0].invert_yaxis()
    axes[1].set_title("its start", fontsize="medium")
    figure.legend(
        handles=[Patch(color=color, label=kind) for kind, color in KINDS.items()],
        loc="outside upper center",
        ncols=len(KINDS),
        frameon=False,
    )
    save(figure, options.picture)


if __name__ == "__main__":
    command.run(main)
