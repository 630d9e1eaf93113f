"""Execution counts of the instructions of an XLA program for TPUs, including instructions in calls and loops."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping

_COMPUTATION = re.compile(r"^(ENTRY )?%?(\S+) \(.*\) -> .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?(\S+) = (.*)$")
_LOOP = re.compile(r" while\(.*condition=%?([\w.\-]+), body=%?([\w.\-]+)")
_BRANCHES = re.compile(
    r" conditional\(.*?(?:branch_computations=\{([^}]*)\}|true_computation=(\S+), false_computation=(\S+))"
)
_CALLED = re.compile(r"(?:calls|to_apply)=%?([\w.\-]+)")
_LIMIT = re.compile(r"compare\(.*?%?([\w.\-]+)\), direction=LT")


@dataclasses.dataclass(frozen=True)
class Hlo:
    """Text of an HLO program, by computation and instruction."""

    entry: str
    computations: Mapping[str, Mapping[str, str]]

    @classmethod
    def parse(cls, text: str) -> Hlo:
        """Parse an optimised HLO module."""
        computations: dict[str, dict[str, str]] = {}
        entry = name = ""
        for line in text.splitlines():
            if match := _COMPUTATION.match(line):
                name = match[2]
                computations[name] = {}
                entry = name if match[1] else entry
            elif (match := _INSTRUCTION.match(line)) and name:
                computations[name][match[1]] = re.sub(
                    r", (metadata|frontend_attributes|backend_config)=.*", "", match[2]
                )
        return cls(entry, computations)

    def executed(self) -> Iterator[tuple[str, str, int]]:
        """Yield the name, text and execution count of each instruction."""
        return self._executed(self.entry, 1)

    def _executed(self, computation: str, times: int) -> Iterator[tuple[str, str, int]]:
        for name, text in self.computations[computation].items():
            if loop := _LOOP.search(text):
                yield from self._executed(loop[2], times * self._trips(loop[1]))
            elif branches := _BRANCHES.search(text):
                for branch in re.findall(r"[\w.\-]+", ",".join(filter(None, branches.groups()))):
                    yield from self._executed(branch, times)
            elif " call(" in text and (called := _CALLED.search(text)):
                yield from self._executed(called[1], times)
            else:
                yield name, text, times

    def _trips(self, condition: str) -> int:
        """Return the trip count of a loop whose counter starts at 0.

        Raises:
            ValueError: The trip count is not constant.
        """
        instructions = self.computations[condition]
        for text in instructions.values():
            if limit := _LIMIT.search(text):
                constant = re.search(r"constant\((\d+)\)", instructions.get(limit[1], ""))
                if constant:
                    return int(constant[1])
        raise ValueError(f"the trips of the loop with condition {condition} are not a constant")

    def signature(self, text: str) -> str:
        """Return the text of an instruction without names, as a key.

        Equal instructions have equal keys. The compiler writes the bundles of equal instructions only once.
        """
        called = _CALLED.search(text)
        body = self.computations.get(called[1], {}) if called else {}
        return re.sub(r"%[\w.\-]+", "%", "\n".join([text, *body.values()]))
