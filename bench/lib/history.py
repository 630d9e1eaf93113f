"""Records of earlier runs of the benchmark programs: device, date, and times."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
#: Keys of times in a record. The value of each entry is the unit of these times in milliseconds.
_UNITS = {"median_ms": 1.0, "latency_ms": 1.0, "us": 1e-3}
#: Keys that identify an entry of a list.
_NAMES = ("problem", "row", "seq_len", "pass", "implementation", "name")


@dataclasses.dataclass(frozen=True)
class Figure:
    """A time in a record.

    Attributes:
        what: Timed item, as the path of keys that lead to the time in the record.
        who: Implementation.
        milliseconds: Time.
    """

    what: str
    who: str
    milliseconds: float


@dataclasses.dataclass(frozen=True)
class Record:
    """A record file.

    Attributes:
        path: Path of the file.
        content: Parsed content.
    """

    path: Path
    content: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Path relative to the repository."""
        path = self.path.resolve()
        return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else self.path.name

    @property
    def _environment(self) -> Mapping[str, Any]:
        found = self.content.get("environment", {})
        return found if isinstance(found, Mapping) else {}

    @property
    def device(self) -> str:
        """Device of the measurement."""
        device = self._environment.get("device") or self.content.get("device") or "unnamed device"
        return str(self._environment.get("processor") or device) if device == "cpu" else str(device)

    @property
    def date(self) -> str:
        """Date in the record; otherwise the date of the last commit that changed the file, or an empty string."""
        named = self._environment.get("date") or self.content.get("date")
        return str(named) if named else _day_of_commit(self.path)

    @property
    def facts(self) -> dict[str, str]:
        """Commit, command and versions, if known."""
        found = self._environment
        versions = ", ".join(f"{name} {value}" for name, value in dict(found.get("versions") or {}).items())
        command = found.get("command")
        commands = command if isinstance(command, list) else [command]  # several runs
        every = {"command": "; ".join(filter(None, commands)), "commit": found.get("commit"), "versions": versions}
        return {name: str(value) for name, value in every.items() if value}

    @property
    def is_board(self) -> bool:
        """Return True if ``board.py`` wrote the record."""
        results = self.content.get("results")
        return isinstance(results, Mapping) and {"peers", "problems"} <= results.keys()

    @property
    def figures(self) -> list[Figure]:
        """Every named time in the record."""
        if str(self.content.get("unit", "")).startswith("milliseconds"):
            return list(_pass_figures(self.content.get("problems", {})))
        parts = {name: part for name, part in self.content.items() if name not in ("environment", "config", "targets")}
        return list(_figures(parts, ()))


def records(paths: Iterable[Path]) -> list[Record]:
    """Read the records among these files, newest first; files without a JSON object are skipped."""
    found = []
    for path in paths:
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict):
            found.append(Record(path, content))
    return sorted(found, key=lambda each: (each.date, each.name), reverse=True)


def _figures(node: Any, way: tuple[str, ...]) -> Iterator[Figure]:
    if isinstance(node, list):
        for number, each in enumerate(node):
            yield from _figures(each, (*way, _label(each, number)))
    elif isinstance(node, Mapping):
        for key, each in node.items():
            if key == "milliseconds" and isinstance(each, Mapping):
                yield from (Figure(_what(way), who, value) for who, value in each.items() if _is_number(value))
            elif key in _UNITS and _is_number(each):
                yield Figure(_what(way[:-1]), way[-1] if way else key, each * _UNITS[key])
            else:
                yield from _figures(each, (*way, key))


def _pass_figures(problems: Mapping[str, Any]) -> Iterator[Figure]:
    """Yield the figures of a record that contains a table of times, by implementation, for each problem and pass."""
    for name, problem in problems.items():
        for pass_, times in problem.items():
            if isinstance(times, Mapping):
                yield from (Figure(f"{name}, {pass_}", who, value) for who, value in times.items())


def _what(way: tuple[str, ...]) -> str:
    hidden = ("results", "records", "sides", "steps", "problems")
    return ", ".join(part.replace("\n", " ") for part in way if part not in hidden)


def _label(entry: Any, number: int) -> str:
    names = [str(entry[key]) for key in _NAMES if key in entry] if isinstance(entry, Mapping) else []
    return ", ".join(names) or str(number)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _day_of_commit(path: Path) -> str:
    command = ["git", "log", "-1", "--format=%cs", "--", path.name]
    try:
        found = subprocess.run(command, cwd=path.parent, capture_output=True, text=True, check=False)
    except OSError:  # git is not installed
        return ""
    return found.stdout.strip()
