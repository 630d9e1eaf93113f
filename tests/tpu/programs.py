"""Inspect compiled programs: count the kernel calls, and find the copies of arguments."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%(\S+) = (.*?) ([a-z][a-z\-]*)\((.*?)\)(?:, |$)(.*)$", re.MULTILINE)
_ARRAY = re.compile(r"[a-z]+[0-9]+\[([0-9,]*)\]")
#: Operations that do not count as copies: they only read an array, or move it to a core's memory and back.
_COPIES_NOTHING = ("bitcast", "copy-start", "copy-done", "slice-start", "slice-done", "get-tuple-element", "tuple")


class _Instruction(NamedTuple):
    kind: str
    elements: int
    operands: Sequence[str]
    facts: str

    @property
    def is_kernel(self) -> bool:
        return self.kind == "custom-call" and "tpu_custom_call" in self.facts


class Program:
    """A compiled program.

    Args:
        text: The program in XLA's text format.
    """

    def __init__(self, text: str) -> None:
        self._instructions: dict[str, _Instruction] = {}
        for name, type_, kind, operands, facts in _INSTRUCTION.findall(text[text.index("\nENTRY ") :]):
            sizes = [math.prod(map(int, filter(None, each.split(",")))) for each in _ARRAY.findall(type_)]
            named = re.findall(r"%([\w.\-]+)", operands)
            self._instructions[name] = _Instruction(kind, max(sizes, default=0), named, facts)

    def calls_of(self, kernel: str) -> int:
        """Return the number of calls of a kernel."""
        named = [each for name, each in self._instructions.items() if re.fullmatch(rf"{kernel}(\.\d+)?", name)]
        return sum(each.is_kernel for each in named)

    def copies_of(self, argument: str) -> list[bool]:
        """Return a value for each copy of an argument on its way to kernels: True if the copy has more elements.

        Args:
            argument: Name of the argument in JAX, for example ``"operands.key"``.
        """
        (found,) = (
            name
            for name, each in self._instructions.items()
            if each.kind == "parameter" and f'op_name="{argument}"' in each.facts
        )
        return list(self._copies(found, self._instructions[found].elements, {found}))

    def _copies(self, name: str, elements: int, seen: set[str]) -> Iterator[bool]:
        for user, each in self._instructions.items():
            if name not in each.operands or user in seen or each.is_kernel:
                continue
            seen.add(user)
            if each.kind not in _COPIES_NOTHING and each.kind != "custom-call":
                yield each.elements > elements
            yield from self._copies(user, elements, seen)
