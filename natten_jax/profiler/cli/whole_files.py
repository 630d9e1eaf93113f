"""Files that are written whole or not at all, in the same encoding everywhere."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

#: Folders of pipes and devices, whose readers want the content itself.
_STREAMS = (Path("/dev"), Path("/proc"))


def write_text(path: Path, text: str) -> None:
    """Write text as UTF-8, whatever the locale; what UTF-8 has no code for, as halves of paths in another encoding, is
    written as an escape.

    Raises:
        OSError: It cannot be written. What the file held before is as it was.
    """
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file beside the one that it replaces, and then put it into its place.

    Pipes and devices get the content as it is, and so does a file in a folder where none can be made.

    Raises:
        OSError: It cannot be written. What a file held before is as it was.
    """
    if _is_stream(path):
        path.write_bytes(content)
        return
    target = Path(os.path.realpath(path))  # a link stays one
    beside = target.with_name(f".natten-jax-{secrets.token_hex(8)}.tmp")
    try:
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except OSError:
        if not target.exists():
            raise
        target.write_bytes(content)
        return
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            if target.exists():
                os.fchmod(descriptor, target.stat().st_mode & 0o7777)
        os.replace(beside, target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def _is_stream(path: Path) -> bool:
    return any(path.absolute().is_relative_to(each) for each in _STREAMS) or (path.exists() and not path.is_file())
