"""Serialised protocol buffers, written field by field."""

from __future__ import annotations


def encoded(number: int) -> bytes:
    """Encode a variable-length integer."""
    groups = []
    while number > 127:
        groups.append(number & 127 | 128)
        number >>= 7
    return bytes([*groups, number])


def field(number: int, value: bytes | int) -> bytes:
    """Encode a field of a message."""
    if isinstance(value, int):
        return encoded(number << 3) + encoded(value)
    return encoded(number << 3 | 2) + encoded(len(value)) + value
