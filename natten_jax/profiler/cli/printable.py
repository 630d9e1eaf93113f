"""Text for streams of any encoding: what a stream has no code for is printed as an escape."""

from __future__ import annotations

import io
import sys
from typing import TextIO


def printable(text: str, file: TextIO) -> str:
    """The text as a stream can print it: ``caf\\xe9`` where that is ASCII, and escapes for halves of characters."""
    encoding = encoding_of(file)
    return text.encode(encoding, "backslashreplace").decode(encoding)


def encoding_of(file: TextIO) -> str:
    """The encoding of a stream; that of one which holds text in memory is any."""
    return getattr(file, "encoding", None) or "utf-8"


def escape_what_cannot_be_printed() -> None:
    """Let the standard streams escape what they cannot encode, instead of raising an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
