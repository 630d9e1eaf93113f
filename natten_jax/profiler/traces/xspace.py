"""The compiled programs inside a trace file, which ``jax.profiler.ProfileData`` does not show.

A trace (``*.xplane.pb``) is a serialised ``tensorflow.profiler.XSpace``. Its plane ``/host:metadata`` holds, per
program, an ``xla.HloProto``. Only the few fields named here are read; the numbers are those of the public definitions
``xplane.proto`` and ``hlo.proto``, which do not change.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from natten_jax.profiler.traces.program import Program
from natten_jax.profiler.traces.protobuf import MalformedMessage, Message
from natten_jax.profiler.traces.trace_files import DamagedTrace

# XSpace, XPlane, an entry of a map, XEventMetadata, XStatMetadata, XStat, HloProto.
_PLANES = 1
_PLANE_NAME, _PLANE_EVENT_METADATA, _PLANE_STAT_METADATA = 2, 4, 5
_MAP_KEY, _MAP_VALUE = 1, 2
_EVENT_STATS = 5
_STAT_NAME = 2
_STAT_METADATA, _STAT_BYTES = 1, 6
_HLO_MODULE = 1

_METADATA_PLANE = "/host:metadata"
_HLO_STAT = "hlo_proto"  # or "Hlo Proto"


def programs(path: Path) -> dict[int, Program]:
    """The programs in a trace file, by the number that events carry; empty where the trace was made without them.

    Raises:
        DamagedTrace: The file is truncated or corrupt.
    """
    try:
        planes = Message(path.read_bytes()).messages(_PLANES)
        return {
            number: Program.of_module(module)
            for plane in planes
            if plane.text(_PLANE_NAME) == _METADATA_PLANE
            for number, module in _modules(plane)
        }
    except MalformedMessage as error:
        raise DamagedTrace(path, str(error)) from error


def _modules(plane: Message) -> Iterator[tuple[int, Message]]:
    """The program that each event stands for, and its number."""
    hlo_stats = {
        entry.number(_MAP_KEY)
        for entry in plane.messages(_PLANE_STAT_METADATA)
        for stat in entry.messages(_MAP_VALUE)
        if stat.text(_STAT_NAME).lower().replace(" ", "_") == _HLO_STAT
    }
    for entry in plane.messages(_PLANE_EVENT_METADATA):
        for event in entry.messages(_MAP_VALUE):
            for stat in event.messages(_EVENT_STATS):
                if stat.number(_STAT_METADATA) in hlo_stats:  # other bytes are anything but messages
                    for proto in stat.messages(_STAT_BYTES):
                        yield from ((entry.number(_MAP_KEY), module) for module in proto.messages(_HLO_MODULE))
