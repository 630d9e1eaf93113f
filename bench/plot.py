"""Draw a saved record: ``python bench/plot.py KIND RECORD PICTURE``.

Example:
    python bench/plot.py speedups bench/results/h200/forward.json speedups.svg
    python bench/plot.py sliding bench/results/h100/beside_cudnn.json docs/images/sliding.svg
    python bench/plot.py tpu-bundles bench/results/tpu docs/images/tpu_bundles.svg
    python bench/plot.py scaling scaling.json scaling.svg --splits heads width-s16x8x8 height-s16x8x8 sequence
"""

from __future__ import annotations

import argparse
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import BENCHMARKS, KINDS, label
from lib import command
from lib.charts import (
    BLUE,
    FAINT,
    FONT_SIZE,
    GRAY,
    GREEN,
    INK,
    LIGHT_BLUE,
    ORANGE,
    RED,
    WIDTH,
    Points,
    dots,
    save,
    style,
)
from lib.timing import MODES
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from natten_jax.performance import PASSES

_MODE_LABELS = {"cold": "after a pause", "sustained": "under sustained load"}
_BASELINE_NAMES = {"cudnn": "cuDNN", "xla": "XLA", "mosaic": "JAX's Mosaic kernel"}


def draw_speedups(record: Mapping[str, Any], path: Path, baseline: str = "cudnn") -> None:
    """Draw a record of peers.py: natten_jax's speedup over the baseline, for each problem and mode."""
    results = record["results"]
    rows = [name for name, each in results.items() if any(_speedups_by_mode(each, baseline))]
    if not rows:
        raise ValueError(f"no problem was run by both natten_jax and {baseline}")
    found = {
        label: {
            row: speedups[mode]
            for row, name in enumerate(rows)
            if mode in (speedups := _speedups_by_mode(results[name], baseline))
        }
        for mode, label in _MODE_LABELS.items()
    }
    points = {label: values for label, values in found.items() if values}
    most = max(value for values in points.values() for value in values.values())
    ticks = [tick for tick in (0.5, 1, 2, 4, 8, 16, 32, 64) if tick == 0.5 or tick / 2 < most]
    if min(value for values in points.values() for value in values.values()) > 0.9:
        ticks = ticks[1:]
    about = f"times as fast as {_BASELINE_NAMES.get(baseline, baseline)} without a window: higher is better"
    names = [BENCHMARKS[name].label if name in BENCHMARKS else name for name in rows]
    with style():
        save(dots(names, {"": points}, about, ticks, row_height=0.38), path)


def _speedups_by_mode(result: Mapping[str, Any], baseline: str) -> dict[str, float]:
    """Return natten_jax's speedups over the baseline for one problem, by mode."""
    found = {mode: result.get(mode, {}).get("speedup", {}).get(baseline) for mode in MODES}
    return {mode: speedup for mode, speedup in found.items() if speedup is not None}


_ABOUT_GROUPS = {
    "sliding": "times as fast as cuDNN's own sliding window: higher is better",
    "video": "times as fast as cuDNN's attention without a mask: higher is better",
}
_TICKS_OF_GROUPS = {"sliding": (0.5, 1, 2), "video": (1, 2, 4)}


def draw_beside_cudnn(record: Mapping[str, Any], path: Path, group: str) -> None:
    """Draw a group of problems from a record of beside_cudnn.py: the speedup over cuDNN for each problem and pass.

    For videos, a second dot shows the number of all query-key pairs, divided by the number of visible pairs.
    """
    rows = record["results"][group]
    panels = {f"{pass_} pass": _points_of_group(rows, pass_, group) for pass_ in PASSES}
    environment = record["environment"]
    about = f"{_ABOUT_GROUPS[group]}\n{environment['device']}, bfloat16"
    with style():
        save(dots(list(rows), panels, about, _TICKS_OF_GROUPS[group], row_height=0.6), path)


def _points_of_group(rows: Mapping[str, Any], pass_: str, group: str) -> Points:
    found = {number: row[pass_] for number, row in enumerate(rows.values()) if "speedup" in row.get(pass_, {})}
    points = {"natten_jax": {number: each["speedup"] for number, each in found.items()}}
    if group == "video":
        points["times fewer pairs"] = {number: 1 / each["share_of_pairs"] for number, each in found.items()}
    return points


_CPU_BASELINE = "dense XLA"
_CPU_IMPLEMENTATIONS = {"cpu-fna": "kernels (cpu-fna)", "flex-fna": "plain JAX (flex-fna)"}
_CPU_PASSES = {"forward": "forward pass", "forward+backward": "forward and backward"}
_CPU_TICKS = 1, 4, 16, 64


def draw_cpu(record: Mapping[str, Any], path: Path) -> None:
    """Draw a record of cpu_kernels.py: each implementation's speedup over dense attention, per problem and pass."""
    problems = list(dict.fromkeys(each["problem"] for each in record["results"]))
    times = {
        (each["problem"], each["pass"], each["implementation"]): each["times_cpu_fna"] for each in record["results"]
    }
    speedups = {
        title: {
            label: {
                row: times[problem, pass_, _CPU_BASELINE] / times[problem, pass_, name]
                for row, problem in enumerate(problems)
            }
            for name, label in _CPU_IMPLEMENTATIONS.items()
        }
        for pass_, title in _CPU_PASSES.items()
    }
    types = "/".join(dict.fromkeys(each["dtype"] for each in record["results"]))
    about = f"times as fast as dense attention in XLA, with a mask: higher is better\n{_processor(record)}, {types}"
    with style():
        save(dots(list(map(_cpu_label, problems)), speedups, about, _CPU_TICKS, row_height=0.6), path)


def _cpu_label(problem: str) -> str:
    """Return the chart label of a problem such as ``2-D 64x64 h4 d64 w13x13``."""
    rank, layout, *_, window = problem.split()
    return f"{KINDS[int(rank[0])]} {layout},\n{re.sub('^w', 'window ', window)}"


def _processor(record: Mapping[str, Any]) -> str:
    environment = record["environment"]
    return f"{environment['processor']}, {environment['native']['host_isa']}"


_PEERS_BASELINE = "cuDNN"
_PEERS = "natten_jax", "NATTEN", "FlexAttention"
_PEERS_TICKS = 1, 2, 4, 8, 16


def draw_peers(record: Mapping[str, Any], path: Path) -> None:
    """Draw ``peers.json``: the speedup of each of several libraries over cuDNN, for each problem and pass."""
    problems = record["problems"].values()
    speedups = {
        f"{pass_} pass": {
            name: {row: each[pass_][_PEERS_BASELINE] / each[pass_][name] for row, each in enumerate(problems)}
            for name in _PEERS
        }
        for pass_ in PASSES
    }
    names = [label(each["layout"], each["kernel_size"], each["stride"]) for each in problems]
    about = f"times as fast as {_PEERS_BASELINE} without a window: higher is better\n"
    about += f"{record['device']}, {record['dtype']}, heads of {record['head_dim']}, {record['date']}"
    with style():
        save(dots(names, speedups, about, _PEERS_TICKS), path)


#: Labels of small.py's programs in the picture, by the program's name.
_SMALL_SIDES = {"natten_jax": "natten_jax", "cutlass-large": "kernels for large windows", "cudnn": "cuDNN, dense"}
#: Labels of small.py's rows in the picture, by the row's name.
_SMALL_NAMES = {
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
_SMALL_TICKS = 1, 2, 4, 8, 16, 32


def draw_small(record: Mapping[str, Any], path: Path) -> None:
    """Draw a record of small.py, for each problem and pass: each program's time relative to a memory copy's time."""
    names = list(dict.fromkeys(each["row"] for each in record["records"]))
    found = {(each["row"], each["pass"]): each["sides"] for each in record["records"]}
    times = {
        f"{pass_} pass": {
            label: {
                row: figures["times copy"]
                for row, name in enumerate(names)
                if isinstance(figures := found.get((name, pass_), {}).get(side), dict)
            }
            for side, label in _SMALL_SIDES.items()
        }
        for pass_ in PASSES
    }
    about = "times as long as a copy of the same bytes: lower is better\n"
    about += f"{record['environment']['device']}, bfloat16"
    with style():
        save(
            dots(
                [_SMALL_NAMES.get(name, name) for name in names], times, about, _SMALL_TICKS, unit="", row_height=0.36
            ),
            path,
        )


#: Labels of tpu_bundles.py's rows in the picture, by the row's name.
_TPU_NAMES = {
    "1-D causal w2048": "sequence, causal,\nwindow 2048",
    "2-D 256x256 w80": "image 256x256,\nwindow 80x80",
    "HunyuanVideo": "HunyuanVideo,\nstride 16x8x8",
    "NAT s1": "NAT, stage 1",
    "64x64 k7": "image 64x64,\nwindow 7x7",
}
#: For each implementation: its name in a record, the name of the count to draw, and its label in the picture.
_TPU_SIDES = ("splash", "bundles", "splash"), ("flex", "program", "plain JAX"), ("dense", "bundles", "dense")
_TPU_TICKS = 1, 2, 4, 8


def draw_tpu_bundles(records: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Draw records of tpu_bundles.py: each implementation's bundles in the forward pass, relative to natten_jax's.

    Each panel shows one chip.
    """
    rows = [name for name in _TPU_NAMES if all(name in record["results"] for record in records.values())]
    panels: dict[str, dict[str, dict[int, float]]] = {}
    for chip, record in records.items():
        sides = [record["results"][name]["forward"] for name in rows]
        panels[chip] = {
            label: {
                row: each[side][counted] / each["natten_jax"][counted]
                for row, each in enumerate(sides)
                if counted in each.get(side, {})
            }
            for side, counted, label in _TPU_SIDES
        }
    about = "bundles, in those of natten_jax: static schedule, not measured\nforward pass, bfloat16"
    with style():
        save(dots([_TPU_NAMES[name] for name in rows], panels, about, _TPU_TICKS, row_height=0.5), path)


#: Color and marker of each method, by the method's name.
_FP8_WAYS = {
    'fp8="e4m3"': (BLUE, "o"),
    "e4m3, a factor for each tensor": (ORANGE, "s"),
    "e4m3, for each block of keys": (GREEN, "^"),
    'fp8="e5m2"': (RED, "v"),
    "bfloat16": (GRAY, "D"),
}
_FP8_DATA = "normal", "outliers", "channels", "peaked rows"
_FP8_TICKS = 128, 1024, 8192
_FP8_ERRORS = 0.003, 0.01, 0.03, 0.1, 0.3


def draw_fp8(record: Mapping[str, Any], path: Path) -> None:
    """Draw a record of fp8_accuracy.py, with a panel for each kind of data and a line for each method."""
    with style():
        save(_fp8_chart(record["results"]["errors"]), path)


def _fp8_chart(errors: Mapping[str, Any]) -> Figure:
    figure = Figure(figsize=(WIDTH, 5.2), layout="constrained")
    panels = figure.subplots(2, 2, sharex=True, sharey=True).flat
    for axes, data in zip(panels, _FP8_DATA, strict=True):
        for way, (color, marker) in _FP8_WAYS.items():
            found = {int(keys): each["relative_rmse"] for keys, each in errors[data][way].items()}
            label = way if data == _FP8_DATA[0] else None
            axes.plot(list(found), list(found.values()), color=color, marker=marker, markersize=4, label=label)
        axes.set_title(data)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(_FP8_TICKS, [f"{tick:,}" for tick in _FP8_TICKS])
        axes.set_yticks(_FP8_ERRORS, [f"{tick:.1%}" if tick < 0.01 else f"{tick:.0%}" for tick in _FP8_ERRORS])
        axes.minorticks_off()
    figure.supxlabel("keys that a query sees", fontsize=FONT_SIZE)
    figure.supylabel("relative error of the output", fontsize=FONT_SIZE)
    figure.legend(loc="outside upper center", ncols=2, columnspacing=1.2)
    return figure


_EVENT_KINDS = {"kernels of attention": BLUE, "copies and merging": LIGHT_BLUE, "exchange": ORANGE}


def _kind_of(event: dict[str, Any]) -> str:
    """Return the kind of an event, which is a key of ``_EVENT_KINDS``."""
    if event["is exchange"]:
        return "exchange"
    return "kernels of attention" if "natten_jax" in event["symbol"] else "copies and merging"


def _draw_lanes(axes: Axes, events: Sequence[dict[str, Any]], first: float, last: float) -> None:
    """Draw the events between the times ``first`` and ``last``, in milliseconds.

    Each device has two lanes. The first lane shows attention kernels, copies and merging. The second lane shows halo
    exchanges.
    """
    for event in events:
        start, end = max(event["start"], first), min(event["start"] + event["milliseconds"], last)
        if start < end:
            lane = 2 * event["device"] + event["is exchange"]
            axes.barh(lane, end - start, left=start, height=0.8, color=_EVENT_KINDS[_kind_of(event)])
    axes.set_xlim(first, last)
    axes.spines["left"].set_visible(False)


def draw_halos(record: Mapping[str, Any], path: Path, row: str | None = None) -> None:
    """Draw the timeline of one row from a record of several_devices.py. The default is the first row.

    A panel shows the whole pass, and another panel shows its start.
    """
    results = record["results"]
    events = results[row or next(iter(results))]["timeline"]
    end = max(event["start"] + event["milliseconds"] for event in events)
    with style():
        save(_halos_chart(events, end), path)


def _halos_chart(events: Sequence[dict[str, Any]], end: float) -> Figure:
    figure = Figure(figsize=(WIDTH, 3.9), layout="constrained")
    whole, start = figure.subplots(2, 1)
    devices = sorted({event["device"] for event in events})
    lanes = [f"device {device}{what}" for device in devices for what in ("", ": exchange")]
    for axes, last, title in ((whole, end, "the whole pass"), (start, 0.12 * end, "its start")):
        _draw_lanes(axes, events, 0.0, last)
        axes.set_yticks(range(len(lanes)), lanes)
        axes.tick_params(axis="y", length=0)
        axes.invert_yaxis()
        axes.set_title(title)
    start.set_xlabel("milliseconds")
    handles = [Patch(color=color, label=kind) for kind, color in _EVENT_KINDS.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(_EVENT_KINDS), columnspacing=1.2)
    return figure


_COLUMNS = 2

#: Color of a curve, by the dimension that is split. This dimension is the first word of the split's name.
_SPLIT_COLORS = {
    "time": RED,
    "height": LIGHT_BLUE,
    "width": BLUE,
    "heads": GREEN,
    "sequence": ORANGE,
    "batch": GRAY,
}
_STRIDE_MARKERS = "os^Dv"


def draw_scaling(record: Mapping[str, Any], path: Path, splits: Sequence[str] | None = None) -> None:
    """Draw a record of scaling.py, with a panel for each combination of a kind of scaling, a backend family and a pass.

    A panel has a curve for each of the ``splits``, or for all splits of the record if ``splits`` is ``None``.

    Raises:
        ValueError: The record has no speed-ups of these splits.
    """
    rows = [row for row in record["results"].values() if splits is None or row["split"] in splits]
    rows = [row for row in rows if _speedups(row, "measured") or _speedups(row, "predicted")]
    if not rows:
        raise ValueError("the record has no speed-ups of these splits")
    is_measured = any(_speedups(row, "measured") for row in rows)
    about = f"devices ({record['environment']['device']})" if is_measured else "devices (nothing was measured)"
    with style():
        save(_scaling_chart(rows, about), path)


def _scaling_chart(rows: Sequence[dict[str, Any]], about: str) -> Figure:
    panels = list(dict.fromkeys(map(_title, rows)))
    strides = list(dict.fromkeys(_stride(row) for row in rows))
    markers = {stride: _STRIDE_MARKERS[i % len(_STRIDE_MARKERS)] for i, stride in enumerate(strides)}
    height = -(-len(panels) // _COLUMNS)
    figure = Figure(figsize=(WIDTH, 1.4 + 2.4 * height), layout="constrained")
    places: list[Axes] = list(figure.subplots(height, _COLUMNS, squeeze=False).flat)
    for axes, title in zip(places, panels, strict=False):
        _draw_panel(axes, [row for row in rows if _title(row) == title], markers)
        axes.set_title(title.replace(", ", ",\n"))
    for axes in places[len(panels) :]:
        axes.set_visible(False)
    figure.supxlabel(about, fontsize="medium")
    figure.supylabel("times as fast as one device", fontsize="medium")
    figure.legend(handles=_legend(rows, markers), loc="outside upper center", ncols=3)
    return figure


def _draw_panel(axes: Axes, rows: Sequence[dict[str, Any]], markers: Mapping[str, str]) -> None:
    counts = sorted({point["devices"] for row in rows for point in row["points"]})
    axes.plot(counts, counts, color=FAINT, linewidth=0.8)
    for row in rows:
        color = _SPLIT_COLORS[_dimension(row)]
        for side, line, face in (("measured", "-", color), ("predicted", "--", "none")):
            speedups = _speedups(row, side)
            axes.plot(
                list(speedups),
                list(speedups.values()),
                line,
                color=color,
                marker=markers[_stride(row)],
                markerfacecolor=face,
                markersize=4,
                linewidth=1.2,
            )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(counts, list(map(str, counts)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()


def _legend(rows: Sequence[dict[str, Any]], markers: Mapping[str, str]) -> list[Line2D]:
    dimensions = dict.fromkeys(_dimension(row) for row in rows)
    handles = [Line2D([], [], color=_SPLIT_COLORS[each], label=each) for each in dimensions]
    for stride, marker in markers.items():
        if stride:
            handles.append(Line2D([], [], color=INK, linestyle="", marker=marker, label=f"stride {stride}"))
    return [
        *handles,
        Line2D([], [], color=INK, marker="o", markersize=4, label="measured"),
        Line2D([], [], color=INK, linestyle="--", marker="o", markersize=4, markerfacecolor="none", label="predicted"),
    ]


def _speedups(row: dict[str, Any], side: str) -> dict[int, float]:
    """Return a row's speed-ups over one device, by number of devices."""
    return {point["devices"]: point[side]["speedup"] for point in row["points"] if point.get(side)}


def _title(row: dict[str, Any]) -> str:
    """Return the title of a row's panel."""
    return f"{row['scaling']} scaling, {' '.join(filter(None, (row['family'], row['pass'])))}"


def _dimension(row: dict[str, Any]) -> str:
    return str(row["split"]).partition("-")[0]


def _stride(row: dict[str, Any]) -> str:
    return str(row["split"]).partition("-s")[2]


#: Drawing functions by kind of record.
DRAWINGS: Mapping[str, Callable[..., None]] = {
    "speedups": draw_speedups,
    "sliding": functools.partial(draw_beside_cudnn, group="sliding"),
    "video": functools.partial(draw_beside_cudnn, group="video"),
    "cpu": draw_cpu,
    "peers": draw_peers,
    "small": draw_small,
    "tpu-bundles": draw_tpu_bundles,
    "fp8": draw_fp8,
    "halos": draw_halos,
    "scaling": draw_scaling,
}
#: Command-line option that is passed to the drawing function, by kind of record.
_OPTIONS = {"speedups": "baseline", "halos": "row", "scaling": "splits"}


def main() -> None:
    """Draw the picture of a record, or of all records in a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=DRAWINGS)
    parser.add_argument("record", type=Path, help="a file; for tpu-bundles a folder with a file per chip")
    parser.add_argument("picture", type=Path)
    parser.add_argument("--baseline", default="cudnn", help="baseline of speedups")
    parser.add_argument("--row", help="row of halos (default: the first)")
    parser.add_argument("--splits", nargs="+", help="splits of scaling (default: all)")
    given = parser.parse_args()
    paths = sorted(given.record.glob("*.json")) if given.record.is_dir() else [given.record]
    records = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths}
    record = records if given.record.is_dir() else records[given.record.stem]
    option = _OPTIONS.get(given.kind)
    DRAWINGS[given.kind](record, given.picture, **({option: getattr(given, option)} if option else {}))


if __name__ == "__main__":
    command.run(main)
