"""Compiled programs, read from HLO protos: each instruction with its scope and the plan of its pass.

An HLO proto is a serialized protocol buffer. JAX returns the HLO proto of a compiled program. A trace contains the HLO
protos of the programs that ran.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax

from natten_jax.plan.devices import default_jax_device
from natten_jax.plan.plan import NAME_ATTRIBUTE, PLAN_ATTRIBUTE, Plan

# Messages of ``hlo.proto`` and ``xplane.proto``: number of a field -> name and type. Only these fields are read. The
# type of a repeated field is in brackets.
_Message = dict[int, tuple[str, Any]]
_ENTRY: _Message = {1: ("key", str), 2: ("value", str)}
_INSTRUCTION: _Message = {
    1: ("name", str),
    2: ("opcode", str),
    7: ("metadata", {2: ("op_name", str)}),
    28: ("target", str),
    38: ("called", bytes),
    68: ("attributes", {1: ("map", [_ENTRY])}),
}
_MODULE: _Message = {1: ("name", str), 3: ("computations", [{2: ("instructions", [_INSTRUCTION]), 5: ("id", int)}])}
_HLO: _Message = {1: ("module", bytes)}
_EVENT: _Message = {1: ("key", int), 2: ("value", {5: ("stats", [{1: ("metadata", int), 6: ("bytes", bytes)}])})}
_STAT: _Message = {1: ("key", int), 2: ("value", {2: ("name", str)})}
_TRACE: _Message = {1: ("planes", [{4: ("events", [_EVENT]), 5: ("stats", [_STAT])}])}

# Opcodes of instructions that only run other instructions.
_CONTAINERS = ("while", "conditional", "call", "async-start", "async-done")

# Wire types of fields in a protocol buffer. ``_VARINT`` is the type of integers with a variable length. ``_SIZES`` maps
# types of a fixed size to the number of bytes. A field of any other wire type begins with its length in bytes.
_VARINT, _SIZES = 0, {1: 8, 5: 4}


@dataclasses.dataclass(frozen=True)
class Instruction:
    """An instruction of a compiled program.

    Attributes:
        opcode: ``"fusion"``, ``"custom-call"``, ``"copy"``, ...
        scope: Scope path in the traced function. The last part of the path is the name of a JAX primitive.
        target: Target of a custom call; empty for other instructions.
        plan: Plan of the natten_jax pass that the instruction belongs to, or ``None``.
        fused: Opcodes of the instructions inside a fusion or an asynchronous instruction.
    """

    opcode: str = ""
    scope: str = ""
    target: str = ""
    plan: Plan | None = None
    fused: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program.

    Attributes:
        module: Name of the program in the events of a trace.
        instructions: Name of an instruction -> the instruction.
        devices: Number of this process's devices that run the program.
    """

    module: str
    instructions: dict[str, Instruction]
    devices: int = 1

    @classmethod
    def from_compiled(cls, compiled: jax.stages.Compiled) -> Program:
        executable: Any = compiled.runtime_executable()
        (module,) = executable.hlo_modules()
        return cls.from_proto(module.as_serialized_hlo_module_proto(), len(executable.local_devices()))

    @classmethod
    def from_proto(cls, proto: bytes, devices: int = 1) -> Program:
        """Read a serialized ``xla.HloModuleProto``."""
        module = _decode(proto, _MODULE)
        computations = {each["id"]: each["instructions"] for each in module["computations"]}
        every = [each for inside in computations.values() for each in inside]
        # Every instruction of a pass has an attribute with the name of the plan. One of these instructions also has an
        # attribute with the plan.
        plans: dict[str, Plan] = {}
        for each in every:
            each["marks"] = {entry["key"]: entry["value"] for entry in each["attributes"]["map"]}
            # KeyError: most instructions lack these attributes. ValueError: another version of the package wrote the
            # plan.
            with contextlib.suppress(KeyError, ValueError):
                plans[each["marks"][NAME_ATTRIBUTE]] = Plan.from_payload(each["marks"][PLAN_ATTRIBUTE])
        instructions = {}
        for each in every:
            fused = set[str]()
            if each["opcode"] in ("fusion", "async-start"):
                called = [computations.get(number, ()) for number in _packed(each["called"])]
                fused = {inner["opcode"] for inside in called for inner in inside} - {"parameter", "constant"}
            scope = each["metadata"]["op_name"].partition(";")[0]  # merged instructions have several scopes
            plan = plans.get(each["marks"].get(NAME_ATTRIBUTE, ""))
            instructions[each["name"]] = Instruction(each["opcode"], scope, each["target"], plan, frozenset(fused))
        return cls(module["name"], instructions, devices)

    def is_module(self, name: str) -> bool:
        """Return True if ``name``, the module name of an event, is the module name of this program.

        ``name`` can end with a number in parentheses, which is ignored.
        """
        return name.partition("(")[0] == self.module

    def instruction(self, name: str) -> Instruction:
        """Return the instruction with a name, or an empty instruction if the program lacks the name."""
        return self.instructions.get(name, Instruction())

    def is_container(self, name: str) -> bool:
        """Return True if the instruction with this name only runs other instructions."""
        return self.instruction(name).opcode in _CONTAINERS


def compile_for_trace(function: Callable[..., Any], *arguments: Any) -> jax.stages.Compiled:
    """Compile a function for the default device, so that a trace names the instruction of every kernel.

    Command buffers (CUDA graphs) are disabled, because a trace shows each command buffer as one launch, without the
    instructions of its kernels.
    """
    is_gpu = default_jax_device().platform == "gpu"
    options: dict[str, Any] | None = {"xla_gpu_enable_command_buffer": ""} if is_gpu else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # warnings of modules that a baseline imports
        return jax.jit(function).lower(*arguments).compile(compiler_options=options)


def programs_in_trace(trace: bytes) -> dict[int, Program]:
    """Return the compiled programs in a valid ``*.xplane.pb`` file, by program number.

    ``jax.profiler.ProfileData`` does not return these programs, because the file stores them as metadata of a plane
    without events.
    """
    programs: dict[int, Program] = {}
    for plane in _decode(trace, _TRACE)["planes"]:
        stats = {each["key"]: each["value"]["name"].lower().replace(" ", "_") for each in plane["stats"]}
        for event in plane["events"]:
            for stat in event["value"]["stats"]:
                if stats.get(stat["metadata"]) == "hlo_proto":
                    programs[event["key"]] = Program.from_proto(_decode(stat["bytes"], _HLO)["module"])
    return programs


def _decode(data: Any, type_: Any) -> Any:
    """Decode a field of a serialized protocol buffer. A message becomes a dictionary; absent fields get defaults."""
    if not isinstance(type_, dict):
        return data.decode(errors="replace") if type_ is str else data or type_()
    message = {name: [] if isinstance(each, list) else _decode(b"", each) for name, each in type_.values()}
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        value: Any
        value, position = (_SIZES[key & 7], position) if key & 7 in _SIZES else _varint(data, position)
        if key & 7 != _VARINT:
            value, position = data[position : position + value], position + value
        name, each = type_.get(key >> 3, ("", None))
        if isinstance(each, list):
            message[name].append(_decode(value, each[0]))
        elif each is not None:
            message[name] = _decode(value, each)
    return message


def _packed(data: bytes) -> Iterator[int]:
    """Yield the integers of a packed repeated field."""
    position = 0
    while position < len(data):
        number, position = _varint(data, position)
        yield number


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Return the variable-length integer that starts at a position, and the position after this integer."""
    value = shift = 0
    while data[position] >= 128:
        value |= (data[position] & 127) << shift
        shift += 7
        position += 1
    return value | data[position] << shift, position + 1
