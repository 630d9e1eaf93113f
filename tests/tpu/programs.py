"""Compiled programs: which kernels they call, and which copies of their arguments they make."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence

_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%(\S+) = (.*?) ([a-z][a-z\-]*)\((.*?)\)(?:, |$)(.*)$", re.MULTILINE)
_ARRAY = re.compile(r"[a-z]+[0-9]+\[([0-9,]*)\]")
#: These only look at an array, or bring it to a core's own memory and back.
_COPIES_NOTHING = ("bitcast", "copy-start", "copy-done", "slice-start", "slice-done", "get-tuple-element", "tuple")


@dataclasses.dataclass(frozen=True)
class Copy:
    """An array that is nothing but an argument in another order.

    Attributes:
        name: The name of the instruction that writes it.
        is_padded: Whether it has more elements.
    """

    name: str
    is_padded: bool


@dataclasses.dataclass(frozen=True)
class _Instruction:
    kind: str
    elements: int
    operands: Sequence[str]
    facts: str

    @property
    def is_kernel(self) -> bool:
        return self.kind == "custom-call" and "tpu_custom_call" in self.facts


@dataclasses.dataclass(frozen=True)
class Program:
    """A program.

    Attributes:
        instructions: Those of its entry, by name.
    """

    instructions: Mapping[str, _Instruction]

    @classmethod
    def of(cls, text: str) -> Program:
        """That of a program as XLA writes it."""
        found = {}
        for name, type_, kind, operands, facts in _INSTRUCTION.findall(text[text.index("\nENTRY ") :]):
            elements = max(
                (math.prod(map(int, filter(None, each.split(",")))) for each in _ARRAY.findall(type_)), default=0
            )
            found[name] = _Instruction(kind, elements, re.findall(r"%([\w.\-]+)", operands), facts)
        return cls(found)

    def calls_of(self, kernel: str) -> int:
        """How often a kernel is called."""
        return sum(
            each.is_kernel and re.fullmatch(rf"{kernel}(\.\d+)?", name) is not None
            for name, each in self.instructions.items()
        )

    def copies_of(self, argument: str) -> list[Copy]:
        """The copies of an argument that are made on the way to kernels.

        Args:
            argument: As JAX calls it, ``"operands.key"``.
        """
        (found,) = (
            name
            for name, each in self.instructions.items()
            if each.kind == "parameter" and f'op_name="{argument}"' in each.facts
        )
        return list(self._copies(found, self.instructions[found].elements, {found}))

    def _copies(self, name: str, elements: int, seen: set[str]) -> Iterator[Copy]:
        for user, each in self.instructions.items():
            if name not in each.operands or user in seen or each.is_kernel:
                continue
            seen.add(user)
            if each.kind not in _COPIES_NOTHING and each.kind != "custom-call":
                yield Copy(user, each.elements > elements)
            yield from self._copies(user, elements, seen)
