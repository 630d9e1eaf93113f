"""Compiled programs, and what their text says about their instructions: where they come from and what they are."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import jax

from natten_jax.plan.devices import default_jax_device
from natten_jax.plan.marks import NAME_ATTRIBUTE, PLAN_ATTRIBUTE
from natten_jax.plan.plan import Plan

# `  ROOT %name = f32[8,16]{1,0} fusion(%a, %b), kind=kLoop, ...`; tuple types hold no lower-case word before `(`.
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = .*?(?<![\w.-])([a-z][\w-]*)\(")
_MODULE = re.compile(r"^HloModule ([^\s,]+)")
_DEVICES = re.compile(r"\b(?:num_partitions|replica_count)=(\d+)")  # their product; each is left out where it is 1
_SCOPE = re.compile(r'op_name="([^";]*)')  # merged instructions list several, with semicolons
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_CALLED = re.compile(r"calls=%?([\w.-]+)")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) .*\{$")
# What instructions of a pass are marked with (natten_jax.plan.marks): the name of a plan, and on one of them the plan.
_PLAN_NAME = re.compile(rf'\b{NAME_ATTRIBUTE}="?([0-9a-f]+)\b')
_PLAN = f"{PLAN_ATTRIBUTE}={{"

# Instructions that do nothing but run others.
_CONTAINERS = ("while", "conditional", "call", "async-start", "async-done")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """An instruction of a compiled program.

    Attributes:
        opcode: ``"fusion"``, ``"custom-call"``, ``"copy"``, ...
        scope: The path of scopes in the traced function, ending in the name of a JAX primitive.
        target: What a custom call calls; empty for other instructions.
        plan: How the pass runs that natten_jax marked the instruction as part of; ``None`` where it is none of its own.
        fused: Opcodes inside a fusion.
    """

    opcode: str = ""
    scope: str = ""
    target: str = ""
    plan: Plan | None = None
    fused: frozenset[str] = frozenset()

    def fusing(self, *opcodes: Iterable[str]) -> Instruction:
        """This fusion with what is inside it."""
        return dataclasses.replace(self, fused=frozenset().union(*opcodes) - {"parameter", "constant"})


def compile_for_trace(function: Callable[..., Any], *arguments: Any) -> jax.stages.Compiled:
    """Compile a function for the default device so that a trace attributes every kernel to its instruction.

    A command buffer (CUDA graph) is one launch to the profiler: its kernels would lose their instructions' names.
    """
    is_gpu = default_jax_device().platform == "gpu"
    options: dict[str, Any] | None = {"xla_gpu_enable_command_buffer": ""} if is_gpu else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of modules that a baseline imports
        return jax.jit(function).lower(*arguments).compile(compiler_options=options)


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program.

    Attributes:
        module: Its name, which the events of a trace carry.
        instructions: By name.
        devices: How many devices it runs on at the same time.
    """

    module: str
    instructions: dict[str, Instruction]
    devices: int = 1

    @classmethod
    def of(cls, compiled: jax.stages.Compiled) -> Program:
        """Read a compiled program."""
        return cls.parse(compiled.as_text() or "")

    @classmethod
    def parse(cls, text: str) -> Program:
        """Read the text of a compiled program, as ``jax.stages.Compiled.as_text`` returns it."""
        module, computation, devices = "", "", 1
        instructions: dict[str, Instruction] = {}
        called: dict[str, str] = {}
        opcodes: dict[str, set[str]] = {}
        marks = PlanMarks()
        for line in text.splitlines():
            if match := _INSTRUCTION.match(line):
                name, opcode = match.groups()
                opcodes.setdefault(computation, set()).add(opcode)
                instructions[name] = Instruction(opcode, _first(_SCOPE, line), _first(_TARGET, line))
                start = line.find(_PLAN)
                marks.add(name, _first(_PLAN_NAME, line), "" if start < 0 else line[start + len(_PLAN) - 1 :])
                if opcode == "fusion":
                    called[name] = _first(_CALLED, line)
            elif match := _COMPUTATION.match(line):
                computation = match[1]
            elif match := _MODULE.match(line):
                module, devices = match[1], math.prod(map(int, _DEVICES.findall(line)))
        for name, fused in called.items():
            instructions[name] = instructions[name].fusing(opcodes.get(fused, ()))
        return cls(module, marks.applied(instructions), devices)

    def is_module(self, name: str) -> bool:
        """Whether an event's module is this program; traces may append the program's number in parentheses."""
        return name.partition("(")[0] == self.module

    def instruction(self, name: str) -> Instruction:
        """The instruction of that name, or one without any properties."""
        return self.instructions.get(name, Instruction())

    def is_container(self, name: str) -> bool:
        """Whether the instruction only runs others."""
        return self.instruction(name).opcode in _CONTAINERS


def _first(pattern: re.Pattern[str], line: str) -> str:
    match = pattern.search(line)
    return match[1] if match else ""


class PlanMarks:
    """What the instructions of a program say of plans."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._plans: dict[str, Plan] = {}

    def add(self, instruction: str, name: str, payload: str) -> None:
        """What an instruction is marked with: the name of a plan, and a text that starts with the plan, or nothing."""
        if not name:
            return
        self._names[instruction] = name
        plan = _marked_plan(payload) if payload and name not in self._plans else None
        if plan is not None:
            self._plans[name] = plan

    def applied(self, instructions: dict[str, Instruction]) -> dict[str, Instruction]:
        """The instructions with their plans."""
        found = {key: self._plans[name] for key, name in self._names.items() if name in self._plans}
        return {
            key: dataclasses.replace(each, plan=found[key]) if key in found else each
            for key, each in instructions.items()
        }


def _marked_plan(text: str) -> Plan | None:
    """The plan that a text starts with; ``None`` of what another version of the package wrote."""
    try:
        _, end = json.JSONDecoder().raw_decode(text)
        return _plan_of(text[:end])
    except ValueError:
        return None


@functools.lru_cache(maxsize=256)
def _plan_of(payload: str) -> Plan:
    return Plan.of_payload(payload)
