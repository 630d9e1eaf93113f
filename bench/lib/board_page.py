"""Results of ``board.py`` as an HTML page: the newest figures of each device, their history, and every record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from lib.history import Record
from natten_jax.performance import PASSES

_STYLE = """
:root{--ink:#1f2933;--soft:#52606d;--paper:#fff;--line:#d9dee4;--ours:#2f7fc1;--other:#8f9aa6;--wash:#f4f6f8}
@media(prefers-color-scheme:dark){:root{--ink:#d7dde4;--soft:#9aa5b1;--paper:#131416;--line:#333b44;--ours:#5aa5e0;
--other:#717c87;--wash:#1c1f23}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:60rem;padding:1rem;background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,sans-serif;overflow-wrap:anywhere}
h1{font-size:1.6rem}h2{margin-top:2.5rem;font-size:1.3rem}h3{margin:1.5rem 0 .3rem;font-size:1.05rem}
p,.about{color:var(--soft);margin:.3rem 0}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.92rem}
th,td{padding:.25rem .6rem .25rem 0;text-align:left;vertical-align:top;border-bottom:1px solid var(--line)}
th.n{width:6.5rem}td.who{white-space:nowrap}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.bar{display:block;height:.5rem;min-width:2px;border-radius:2px;background:var(--other)}
.ours .bar{background:var(--ours)}.ours td:first-child{font-weight:600}
code{background:var(--wash);padding:.1rem .3rem;border-radius:3px}
details{border-bottom:1px solid var(--line);padding:.3rem 0}summary{cursor:pointer}
dl{margin:.4rem 0}dt{font-weight:600}dd{margin:0 0 .3rem}
"""
_OURS = "natten_jax"


def page(records: Sequence[Record]) -> str:
    """Format a self-contained page of these records, which are ordered newest first."""
    boards = [record for record in records if record.is_board]
    parts = [
        "<h1>natten_jax: the board</h1>",
        "<p>The same list of problems on every device, run by all implementations that were installed there. Lower is "
        "better. Dense attention sees all tokens, without windows. <code>make board</code> measures the current "
        "device and writes this page again.</p>",
        *(_device(device, device_boards) for device, device_boards in _by_device(boards).items()),
        "<h2>Every record</h2>",
        "<p>What was measured, newest first, with the command that measures it again.</p>",
        *(_records(device, device_boards) for device, device_boards in _by_device(records).items()),
    ]
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>natten_jax: the board</title><style>{_STYLE}</style>'
    )
    body = "\n".join(parts)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def _by_device(records: Iterable[Record]) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(record.device, []).append(record)
    return found


def _device(device: str, boards: Sequence[Record]) -> str:
    """Format the newest results of a device, and natten_jax's times on the device in all records."""
    newest = boards[0]
    results = newest.content["results"]
    parts = [f"<h2>{escape(device)}</h2>", f'<p class="about">{escape(newest.date)}, {escape(newest.name)}</p>']
    parts += [_problem(name, problem) for name, problem in results["problems"].items()]
    parts += ["<h3>Implementations</h3>", _peers(results["peers"])]
    if len(boards) > 1:
        parts += ["<h3>natten_jax over time, milliseconds</h3>", _over_time(boards)]
    return "\n".join(parts)


def _problem(name: str, problem: Mapping[str, Any]) -> str:
    shape = "x".join(map(str, problem["shape"]))
    about = f"{problem['problem']}, {problem['dtype']}, arrays of {shape}"
    parts = [f'<h3>{escape(name)}</h3><p class="about">{escape(about)}</p>']
    parts += [_pass(pass_, problem[pass_]) for pass_ in PASSES if pass_ in problem]
    return "\n".join(parts)


def _pass(pass_: str, figures: Mapping[str, Any]) -> str:
    most = max(figures["milliseconds"].values(), default=1.0)
    rows = []
    for name, milliseconds in sorted(figures["milliseconds"].items(), key=lambda each: each[1]):
        note = "" if figures["computes_windows"][name] else " (dense)"
        times = figures["times_ours"].get(name)
        relative = "" if times is None or name == _OURS else f"{times:.2f}x"
        rows.append(
            f"<tr{' class=ours' if name == _OURS else ''}><td>{escape(name + note)}"
            f'<span class="bar" style="width:{100 * milliseconds / most:.1f}%"></span></td>'
            f'<td class="n">{_digits(milliseconds)}</td><td class="n">{relative}</td></tr>'
        )
    rows += [
        f'<tr><td colspan="3">{escape(name)}: {escape(reason)}</td></tr>'
        for name, reason in figures["failures"].items()
    ]
    return _table((f"{pass_} pass", "ms", "times natten_jax"), rows, numbers_from=1)


def _peers(peers: Mapping[str, Mapping[str, Any]]) -> str:
    rows = []
    for name, peer in peers.items():
        state = peer["absent"] or peer["version"] or "version not known"
        rows.append(f"<tr><td>{escape(name)}</td><td>{escape(state)}</td><td>{escape(peer['about'])}</td></tr>")
    return _table(("", "", "what runs"), rows)


def _over_time(boards: Sequence[Record]) -> str:
    """Format a row for each problem and pass, with a column for each record of ``board.py``, oldest first."""
    columns: list[dict[tuple[str, str], float]] = []
    for board in reversed(boards):
        problems = board.content["results"]["problems"].items()
        columns.append(
            {
                (name, pass_): problem[pass_]["milliseconds"][_OURS]
                for name, problem in problems
                for pass_ in PASSES
                if _OURS in problem.get(pass_, {}).get("milliseconds", {})
            }
        )
    rows = []
    for key in dict.fromkeys(key for column in columns for key in column):
        cells = (f'<td class="n">{_digits(column[key]) if key in column else ""}</td>' for column in columns)
        rows.append(f"<tr><td>{escape(', '.join(key))}</td>{''.join(cells)}</tr>")
    return _table(("", *(board.date for board in reversed(boards))), rows, numbers_from=1)


def _records(device: str, records: Sequence[Record]) -> str:
    return "\n".join([f"<h3>{escape(device)}</h3>", *map(_record, records)])


def _record(record: Record) -> str:
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in record.facts.items())
    rows = [
        f'<tr><td>{escape(each.what)}</td><td class="who">{escape(each.who)}</td>'
        f'<td class="n">{_digits(each.milliseconds)}</td></tr>'
        for each in record.figures
    ]
    table = _table(("what", "who", "ms"), rows, numbers_from=2) if rows else ""
    title = f"{escape(record.date)} {escape(record.name)}"
    return f"<details><summary>{title}</summary><dl>{facts}</dl>{table}</details>"


def _table(header: Sequence[str], rows: Iterable[str], numbers_from: int | None = None) -> str:
    cells = (
        f"<th{' class=n' if numbers_from is not None and column >= numbers_from else ''}>{escape(title)}</th>"
        for column, title in enumerate(header)
    )
    return f'<div class="wide"><table><tr>{"".join(cells)}</tr>\n{chr(10).join(rows)}</table></div>'


def _digits(milliseconds: float) -> str:
    """Format milliseconds with four significant digits, from 1000 on as an integer."""
    return f"{milliseconds:.4g}" if milliseconds < 1000 else f"{milliseconds:.0f}"
