"""Serialised protocol buffers, read by the numbers of their fields."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

_LONGEST_NUMBER = 10  # bytes: 64 bits, seven in each

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class MalformedMessage(ValueError):
    """Bytes that are no serialised message."""


class Message:
    """The fields of a serialised message; those that are messages themselves are read when they are asked for.

    Raises:
        MalformedMessage: The bytes are no message.
    """

    def __init__(self, data: bytes) -> None:
        self._fields: dict[int, list[int | bytes]] = defaultdict(list)
        position = 0
        while position < len(data):
            key, position = _varint(data, position)
            field, kind = key >> 3, key & 7
            if field == 0:
                raise MalformedMessage("a field has no number")
            if kind in (_VARINT, _BYTES):
                value, position = _varint(data, position)
                size = value if kind == _BYTES else 0
            elif kind in (_FIXED64, _FIXED32):
                size = 8 if kind == _FIXED64 else 4
            else:
                raise MalformedMessage(f"a field is of the unknown kind {kind}")
            if size > len(data) - position:
                raise MalformedMessage("a field is longer than what holds it")
            if kind in (_VARINT, _BYTES):
                self._fields[field].append(value if kind == _VARINT else data[position : position + size])
            position += size

    def messages(self, field: int) -> Iterator[Message]:
        """The messages in a field."""
        return (Message(value) for value in self._fields.get(field, ()) if isinstance(value, bytes))

    def text(self, field: int) -> str:
        """The text in a field; empty where there is none."""
        value = self._fields.get(field, [b""])[0]
        return value.decode(errors="replace") if isinstance(value, bytes) else ""

    def number(self, field: int) -> int:
        """The integer in a field; 0 where there is none."""
        value = self._fields.get(field, [0])[0]
        return value if isinstance(value, int) else 0

    def numbers(self, field: int) -> list[int]:
        """The integers in a field, whether they are packed into bytes or not."""
        found: list[int] = []
        for value in self._fields.get(field, ()):
            if isinstance(value, int):
                found.append(value)
                continue
            position = 0
            while position < len(value):
                number, position = _varint(value, position)
                found.append(number)
        return found


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """The number at a position, and where it ends."""
    value = 0
    for i, byte in enumerate(data[position : position + _LONGEST_NUMBER]):
        value |= (byte & 127) << 7 * i
        if byte < 128:
            return value, position + i + 1
    raise MalformedMessage("a number does not end")
