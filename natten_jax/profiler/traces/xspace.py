"""The compiled programs inside a trace file, which ``jax.profiler.ProfileData`` does not show.

A trace (``*.xplane.pb``) is a serialised ``tensorflow.profiler.XSpace``. Its plane ``/host:metadata`` holds, per
program, an ``xla.HloProto``. Only the few fields named here are read; the numbers are those of the public definitions
``xplane.proto`` and ``hlo.proto``, which do not change.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from natten_jax.plan.marks import NAME_ATTRIBUTE, PLAN_ATTRIBUTE
from natten_jax.profiler.traces.program import Instruction, PlanMarks, Program
from natten_jax.profiler.traces.trace_files import DamagedTrace

# XSpace, XPlane, an entry of a map, XEventMetadata, XStatMetadata, XStat.
_PLANES = 1
_PLANE_NAME, _PLANE_EVENT_METADATA, _PLANE_STAT_METADATA = 2, 4, 5
_MAP_KEY, _MAP_VALUE = 1, 2
_EVENT_STATS = 5
_STAT_NAME = 2
_STAT_METADATA, _STAT_BYTES = 1, 6
# HloProto, HloModuleProto, HloComputationProto.
_HLO_MODULE = 1
_MODULE_NAME, _MODULE_COMPUTATIONS = 1, 3
_COMPUTATION_INSTRUCTIONS, _COMPUTATION_ID = 2, 5
# HloInstructionProto, OpMetadata, FrontendAttributes.
_NAME, _OPCODE, _METADATA, _TARGET, _CALLED, _ATTRIBUTES = 1, 2, 7, 28, 38, 68
_OP_NAME = 2
_ATTRIBUTE_MAP = 1

_METADATA_PLANE = "/host:metadata"
_HLO_STAT = "hlo_proto"  # or "Hlo Proto"

_LONGEST_NUMBER = 10  # bytes: 64 bits, seven in each

_Message = dict[int, list["int | bytes"]]


class _Malformed(ValueError):
    """Bytes that are no serialised message."""


def programs(path: Path) -> dict[int, Program]:
    """The programs in a trace file, by the number that events carry; empty where the trace was made without them.

    Raises:
        DamagedTrace: The file is truncated or corrupt.
    """
    try:
        return _programs(path.read_bytes())
    except _Malformed as error:
        raise DamagedTrace(path, str(error)) from error


def _programs(data: bytes) -> dict[int, Program]:
    found = {}
    for plane in _messages(_fields(data), _PLANES):
        if _text(plane, _PLANE_NAME) != _METADATA_PLANE:
            continue
        hlo_stats = set(_hlo_stats(plane))
        for entry in _messages(plane, _PLANE_EVENT_METADATA):
            number = _number(entry, _MAP_KEY)
            for event in _messages(entry, _MAP_VALUE):
                for stat in _messages(event, _EVENT_STATS):
                    if _number(stat, _STAT_METADATA) not in hlo_stats:
                        continue  # other bytes are anything but messages
                    for proto in _messages(stat, _STAT_BYTES):
                        for module in _messages(proto, _HLO_MODULE):
                            found[number] = _program(module)
    return found


def _hlo_stats(plane: _Message) -> Iterator[int]:
    """Numbers of the statistics that hold a program."""
    for entry in _messages(plane, _PLANE_STAT_METADATA):
        for stat in _messages(entry, _MAP_VALUE):
            if _text(stat, _STAT_NAME).lower().replace(" ", "_") == _HLO_STAT:
                yield _number(entry, _MAP_KEY)


def _program(module: _Message) -> Program:
    instructions: dict[str, Instruction] = {}
    opcodes: dict[int, set[str]] = defaultdict(set)
    calls: dict[str, list[int]] = {}
    marks = PlanMarks()
    for computation in _messages(module, _MODULE_COMPUTATIONS):
        number = _number(computation, _COMPUTATION_ID)
        for proto in _messages(computation, _COMPUTATION_INSTRUCTIONS):
            name, opcode = _text(proto, _NAME), _text(proto, _OPCODE)
            opcodes[number].add(opcode)
            scopes = [_text(each, _OP_NAME) for each in _messages(proto, _METADATA)]
            attributes = {
                _text(entry, _MAP_KEY): _text(entry, _MAP_VALUE)
                for each in _messages(proto, _ATTRIBUTES)
                for entry in _messages(each, _ATTRIBUTE_MAP)
            }
            scope = scopes[0].partition(";")[0] if scopes else ""
            marks.add(name, attributes.get(NAME_ATTRIBUTE, ""), attributes.get(PLAN_ATTRIBUTE, ""))
            instructions[name] = Instruction(opcode, scope, _text(proto, _TARGET))
            if opcode in ("fusion", "async-start"):
                calls[name] = _numbers(proto, _CALLED)
    for name, called in calls.items():
        instructions[name] = instructions[name].fusing(*(opcodes[number] for number in called))
    return Program(_text(module, _MODULE_NAME), marks.applied(instructions))


def _messages(message: _Message, field: int) -> Iterator[_Message]:
    for value in message.get(field, ()):
        if isinstance(value, bytes):
            yield _fields(value)


def _text(message: _Message, field: int) -> str:
    value = message.get(field, [b""])[0]
    return value.decode(errors="replace") if isinstance(value, bytes) else ""


def _number(message: _Message, field: int) -> int:
    value = message.get(field, [0])[0]
    return value if isinstance(value, int) else 0


def _numbers(message: _Message, field: int) -> list[int]:
    """Values of a repeated field of integers, whether they are packed into bytes or not."""
    numbers: list[int] = []
    for value in message.get(field, ()):
        if isinstance(value, int):
            numbers.append(value)
            continue
        position = 0
        while position < len(value):
            number, position = _varint(value, position)
            numbers.append(number)
    return numbers


def _fields(data: bytes) -> _Message:
    """The fields of a serialised message, by number; one level only."""
    message: _Message = defaultdict(list)
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        number, kind = key >> 3, key & 7
        if number == 0:
            raise _Malformed("a field has no number")
        if kind == 0:
            value, position = _varint(data, position)
            message[number].append(value)
            continue
        if kind == 2:
            size, position = _varint(data, position)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise _Malformed(f"a field is of the unknown kind {kind}")
        if size > len(data) - position:
            raise _Malformed("a field is longer than what holds it")
        if kind == 2:
            message[number].append(data[position : position + size])
        position += size
    return message


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = 0
    for i, byte in enumerate(data[position : position + _LONGEST_NUMBER]):
        value |= (byte & 127) << 7 * i
        if byte < 128:
            return value, position + i + 1
    raise _Malformed("a number does not end")
