"""Compiled programs, and what they say about their instructions: where these come from and what they are.

They are read as serialised ``xla.HloModuleProto``. Only the few fields named here are looked at; the numbers are those
of the public definition ``hlo.proto``, which do not change.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import jax

from natten_jax.plan.devices import default_jax_device
from natten_jax.plan.marks import NAME_ATTRIBUTE, PLAN_ATTRIBUTE
from natten_jax.plan.plan import Plan
from natten_jax.profiler.traces.protobuf import Message

# HloModuleProto, HloComputationProto.
_MODULE_NAME, _MODULE_COMPUTATIONS = 1, 3
_COMPUTATION_INSTRUCTIONS, _COMPUTATION_ID = 2, 5
# HloInstructionProto, OpMetadata, FrontendAttributes, an entry of a map.
_NAME, _OPCODE, _METADATA, _TARGET, _CALLED, _ATTRIBUTES = 1, 2, 7, 28, 38, 68
_OP_NAME = 2
_ATTRIBUTE_MAP = 1
_MAP_KEY, _MAP_VALUE = 1, 2

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
        devices: How many devices of this process it runs on at the same time.
    """

    module: str
    instructions: dict[str, Instruction]
    devices: int = 1

    @classmethod
    def of(cls, compiled: jax.stages.Compiled) -> Program:
        """Read a compiled program."""
        executable: Any = compiled.runtime_executable()
        (module,) = executable.hlo_modules()
        return cls.of_module(Message(module.as_serialized_hlo_module_proto()), len(executable.local_devices()))

    @classmethod
    def of_module(cls, module: Message, devices: int = 1) -> Program:
        """Read an ``xla.HloModuleProto``."""
        computations = {
            computation.number(_COMPUTATION_ID): list(computation.messages(_COMPUTATION_INSTRUCTIONS))
            for computation in module.messages(_MODULE_COMPUTATIONS)
        }
        opcodes = {number: {each.text(_OPCODE) for each in inside} for number, inside in computations.items()}
        every = [(each, _attributes(each)) for inside in computations.values() for each in inside]
        plans = _marked_plans(attributes for _, attributes in every)
        instructions = {}
        for each, attributes in every:
            opcode, fused = each.text(_OPCODE), set[str]()
            if opcode in ("fusion", "async-start"):
                fused.update(*(opcodes.get(number, ()) for number in each.numbers(_CALLED)))
            # Merged instructions have several scopes.
            scope = next((data.text(_OP_NAME).partition(";")[0] for data in each.messages(_METADATA)), "")
            instructions[each.text(_NAME)] = Instruction(
                opcode,
                scope,
                each.text(_TARGET),
                plans.get(attributes.get(NAME_ATTRIBUTE, "")),
                frozenset(fused - {"parameter", "constant"}),
            )
        return cls(module.text(_MODULE_NAME), instructions, devices)

    def is_module(self, name: str) -> bool:
        """Whether an event's module is this program; traces may append the program's number in parentheses."""
        return name.partition("(")[0] == self.module

    def instruction(self, name: str) -> Instruction:
        """The instruction of that name, or one without any properties."""
        return self.instructions.get(name, Instruction())

    def is_container(self, name: str) -> bool:
        """Whether the instruction only runs others."""
        return self.instruction(name).opcode in _CONTAINERS


def _attributes(instruction: Message) -> dict[str, str]:
    """The frontend attributes of an instruction."""
    return {
        entry.text(_MAP_KEY): entry.text(_MAP_VALUE)
        for attributes in instruction.messages(_ATTRIBUTES)
        for entry in attributes.messages(_ATTRIBUTE_MAP)
    }


def _marked_plans(every: Iterable[dict[str, str]]) -> dict[str, Plan]:
    """The plans that instructions are marked with, by the plan's name, which each instruction of a pass has.

    Args:
        every: Attributes of each instruction; in each pass one of them has the plan itself.
    """
    marked = {NAME_ATTRIBUTE, PLAN_ATTRIBUTE}
    payloads = {marks[NAME_ATTRIBUTE]: marks[PLAN_ATTRIBUTE] for marks in every if marked <= marks.keys()}
    plans = {}
    for name, payload in payloads.items():
        with contextlib.suppress(ValueError):  # what another version of the package wrote
            plans[name] = Plan.of_payload(payload)
    return plans
