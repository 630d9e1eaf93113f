"""Draws what two devices do in a pass whose tokens are split over them, from a record of several_devices.py.

Example:
    python bench/plot_halos.py bench/results/h200x2/timeline.json docs/images/halo_trace.svg
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from lib import command
from lib.charts import BLUE, LIGHT_BLUE, ORANGE, WIDTH, save, style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

KINDS = {"kernels of attention": BLUE, "copies and merging": LIGHT_BLUE, "exchange": ORANGE}


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
    axes.spines["left"].set_visible(False)


def main() -> None:
    """Draw the whole pass, and its start."""
    parser = command.record_parser(__doc__)
    parser.add_argument("--row", help="of the record; the first one, unless named")
    options = parser.parse_args()
    results = json.loads(options.record.read_text(encoding="utf-8"))["results"]
    name = options.row or next(iter(results))
    events = results[name]["timeline"]
    end = max(event["start"] + event["milliseconds"] for event in events)
    with style():
        save(_chart(events, end), options.picture)


def _chart(events: Sequence[dict[str, Any]], end: float) -> Figure:
    figure = Figure(figsize=(WIDTH, 3.9), layout="constrained")
    whole, start = figure.subplots(2, 1)
    devices = sorted({event["device"] for event in events})
    lanes = [f"device {device}{what}" for device in devices for what in ("", ": exchange")]
    for axes, last, title in ((whole, end, "the whole pass"), (start, 0.12 * end, "its start")):
        draw(axes, events, 0.0, last)
        axes.set_yticks(range(len(lanes)), lanes)
        axes.tick_params(axis="y", length=0)
        axes.invert_yaxis()
        axes.set_title(title)
    start.set_xlabel("milliseconds")
    handles = [Patch(color=color, label=kind) for kind, color in KINDS.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(KINDS), columnspacing=1.2)
    return figure


if __name__ == "__main__":
    command.run(main)
