"""Compiled programs, read from HLO protos: instructions, their scopes, and the plans that they are marked with.

JAX returns compiled programs as serialized protocol buffers, and traces contain the programs that ran. Only the fields
below are read. Their numbers are from ``hlo.proto`` and ``xplane.proto``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

from natten_jax.plan.devices import default_jax_device
from natten_jax.plan.plan import NAME_ATTRIBUTE, PLAN_ATTRIBUTE, Plan

# HloModuleProto, HloComputationProto.
_MODULE_NAME, _MODULE_COMPUTATIONS = 1, 3
_COMPUTATION_INSTRUCTIONS, _COMPUTATION_ID = 2, 5
# HloInstructionProto, OpMetadata, FrontendAttributes, an entry of a map.
_NAME, _OPCODE, _METADATA, _TARGET, _CALLED, _ATTRIBUTES = 1, 2, 7, 28, 38, 68
_OP_NAME = 2
_ATTRIBUTE_MAP = 1
_MAP_KEY, _MAP_VALUE = 1, 2
# XSpace, XPlane, XEventMetadata, XStatMetadata, XStat, HloProto.
_PLANES = 1
_PLANE_NAME, _PLANE_EVENT_METADATA, _PLANE_STAT_METADATA = 2, 4, 5
_EVENT_STATS = 5
_STAT_NAME = 2
_STAT_METADATA, _STAT_BYTES = 1, 6
_HLO_MODULE = 1

# Instructions that only run other instructions.
_CONTAINERS = ("while", "conditional", "call", "async-start", "async-done")

# Kinds of fields in the wire format: integers, and bytes of a fixed size. Any other field begins with its size.
_VARINT, _SIZES = 0, {1: 8, 5: 4}


@dataclasses.dataclass(frozen=True)
class Instruction:
    """An instruction of a compiled program.

    Attributes:
        opcode: ``"fusion"``, ``"custom-call"``, ``"copy"``, ...
        scope: Path of scopes in the traced function, ending in the name of a JAX primitive.
        target: Target of a custom call; empty for other instructions.
        plan: Plan of the natten_jax pass that the instruction belongs to, or ``None``.
        fused: Opcodes inside a fusion.
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
        instructions: Instructions by name.
        devices: Number of devices of this process that run it.
    """

    module: str
    instructions: dict[str, Instruction]
    devices: int = 1

    @classmethod
    def from_compiled(cls, compiled: jax.stages.Compiled) -> Program:
        """Read a compiled program."""
        executable: Any = compiled.runtime_executable()
        (module,) = executable.hlo_modules()
        return cls.from_proto(module.as_serialized_hlo_module_proto(), len(executable.local_devices()))

    @classmethod
    def from_proto(cls, proto: bytes, devices: int = 1) -> Program:
        """Read a serialized ``xla.HloModuleProto``."""
        module = _Message(proto)
        computations = {
            computation.number(_COMPUTATION_ID): list(computation.messages(_COMPUTATION_INSTRUCTIONS))
            for computation in module.messages(_MODULE_COMPUTATIONS)
        }
        every = [(each, _attributes(each)) for inside in computations.values() for each in inside]
        plans = _marked_plans(attributes for _, attributes in every)
        instructions = {}
        for each, attributes in every:
            opcode, fused = each.text(_OPCODE), set[str]()
            if opcode in ("fusion", "async-start"):
                called = (computations.get(number, []) for number in each.numbers(_CALLED))
                fused = {inner.text(_OPCODE) for inside in called for inner in inside} - {"parameter", "constant"}
            # Merged instructions have several scopes.
            scope = next((data.text(_OP_NAME).partition(";")[0] for data in each.messages(_METADATA)), "")
            plan = plans.get(attributes.get(NAME_ATTRIBUTE, ""))
            instructions[each.text(_NAME)] = Instruction(opcode, scope, each.text(_TARGET), plan, frozenset(fused))
        return cls(module.text(_MODULE_NAME), instructions, devices)

    def is_module(self, name: str) -> bool:
        """Return if an event's module is this program. Traces may append the program's number in parentheses."""
        return name.partition("(")[0] == self.module

    def instruction(self, name: str) -> Instruction:
        """Return the instruction of that name, or an empty one."""
        return self.instructions.get(name, Instruction())

    def is_container(self, name: str) -> bool:
        """Return if the instruction only runs other instructions."""
        return self.instruction(name).opcode in _CONTAINERS


def compile_for_trace(function: Callable[..., Any], *arguments: Any) -> jax.stages.Compiled:
    """Compile a function for the default device so that a trace attributes every kernel to its instruction.

    A command buffer (CUDA graph) is one launch in a trace: its kernels would lose the names of their instructions.
    """
    is_gpu = default_jax_device().platform == "gpu"
    options: dict[str, Any] | None = {"xla_gpu_enable_command_buffer": ""} if is_gpu else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of modules that a baseline imports
        return jax.jit(function).lower(*arguments).compile(compiler_options=options)


def programs_in_trace(trace: bytes) -> dict[int, Program]:
    """Return the programs in a valid ``*.xplane.pb`` file, by the number that events carry.

    ``jax.profiler.ProfileData`` does not return them: they are metadata of a plane without events.
    """
    found: dict[int, Program] = {}
    for plane in _Message(trace).messages(_PLANES):
        if plane.text(_PLANE_NAME) != "/host:metadata":
            continue
        stats = plane.entries(_PLANE_STAT_METADATA)
        hlo_stats = {number for number, stat in stats if stat.text(_STAT_NAME).lower().replace(" ", "_") == "hlo_proto"}
        for number, event in plane.entries(_PLANE_EVENT_METADATA):
            for stat in event.messages(_EVENT_STATS):
                if stat.number(_STAT_METADATA) in hlo_stats:  # other stats are not messages
                    for hlo in stat.messages(_STAT_BYTES):
                        for module in hlo.values(_HLO_MODULE):
                            found[number] = Program.from_proto(module)
    return found


def _attributes(instruction: _Message) -> dict[str, str]:
    """Return the frontend attributes of an instruction."""
    return {
        entry.text(_MAP_KEY): entry.text(_MAP_VALUE)
        for attributes in instruction.messages(_ATTRIBUTES)
        for entry in attributes.messages(_ATTRIBUTE_MAP)
    }


def _marked_plans(every: Iterable[dict[str, str]]) -> dict[str, Plan]:
    """Return plans by name. Each instruction of a pass has the name; one of them has the plan."""
    plans = {}
    for marks in every:
        # Most instructions lack an attribute, and payloads may be of another version of the package.
        with contextlib.suppress(KeyError, ValueError):
            plans[marks[NAME_ATTRIBUTE]] = Plan.of_payload(marks[PLAN_ATTRIBUTE])
    return plans


class _Message:
    """A serialized protocol buffer, read by numbers of fields."""

    def __init__(self, data: bytes) -> None:
        self._fields: dict[int, list[Any]] = defaultdict(list)
        position = 0
        while position < len(data):
            key, position = _varint(data, position)
            kind, values = key & 7, self._fields[key >> 3]
            number, position = (_SIZES[kind], position) if kind in _SIZES else _varint(data, position)
            if kind == _VARINT:
                values.append(number)
            else:  # a number of bytes
                values.append(data[position : position + number])
                position += number

    def values(self, field: int) -> list[Any]:
        """Return the integers or bytes in a repeated field."""
        return self._fields.get(field, [])

    def messages(self, field: int) -> Iterator[_Message]:
        """Return the messages in a field."""
        return map(_Message, self.values(field))

    def entries(self, field: int) -> Iterator[tuple[int, _Message]]:
        """Yield the numbers and messages in a map."""
        for entry in self.messages(field):
            for value in entry.messages(_MAP_VALUE):
                yield entry.number(_MAP_KEY), value

    def text(self, field: int) -> str:
        """Return the text in a field; empty by default."""
        return b"".join(self.values(field)[:1]).decode(errors="replace")

    def numbers(self, field: int) -> Iterator[int]:
        """Yield the integers in a repeated field, which are packed into bytes."""
        packed, position = b"".join(self.values(field)), 0
        while position < len(packed):
            number, position = _varint(packed, position)
            yield number

    def number(self, field: int) -> int:
        """Return the integer in a field; 0 by default."""
        return next(iter(self.values(field)), 0)


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Return the integer at a position, and the position after it."""
    value = shift = 0
    while data[position] >= 128:
        value |= (data[position] & 127) << shift
        shift += 7
        position += 1
    return value | data[position] << shift, position + 1
