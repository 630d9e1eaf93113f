"""Files are written whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from natten_jax.profiler.cli.whole_files import write_bytes, write_text
from tests.support.programs import output_of, run_python

#: Fails in the midst of a file, as on a full disk.
INTERRUPTED = """
import resource, sys
from pathlib import Path
from natten_jax.profiler.cli.whole_files import write_text

resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    write_text(Path(sys.argv[1]), "x" * 5000)
except OSError as error:
    print("OSError")
"""


def test_what_was_there_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "result"
    for text in ("first", "caf\N{LATIN SMALL LETTER E WITH ACUTE}"):
        write_text(path, text)
        assert path.read_text(encoding="utf-8") == text
    write_text(path, "\udcff")  # half of a character, as of a path in another encoding
    assert path.read_bytes() == rb"\udcff"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("before", [None, "as it was"])
def test_nothing_is_left_of_what_fails(before: str | None, tmp_path: Path) -> None:
    path = tmp_path / "result"
    if before is not None:
        write_text(path, before)
    assert output_of(run_python(INTERRUPTED, str(path))).split() == ["OSError"]
    assert [each.read_text(encoding="utf-8") for each in tmp_path.iterdir()] == ([] if before is None else [before])


def test_links_and_permissions_stay(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    target, link = tmp_path / "elsewhere" / "target", tmp_path / "link"
    write_text(target, "first")
    target.chmod(0o640)
    link.symlink_to(target)
    write_text(link, "second")
    assert link.is_symlink() and target.read_text(encoding="utf-8") == "second"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    umask = os.umask(0o027)
    try:
        write_text(tmp_path / "new", "")
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640


def test_streams_take_what_they_get(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_bytes(pipe, b"content")
    assert os.read(reader, 100) == b"content"
    os.close(reader)
    with pytest.raises(OSError, match="No space left"):
        write_bytes(Path("/dev/full"), b"content" * 10000)
    shown = output_of(
        run_python("from natten_jax.profiler.cli.whole_files import *; write_text(Path('/dev/stdout'), 'here')")
    )
    assert shown == "here"


def test_long_names(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 250)
    write_text(path, "content")
    assert path.read_text(encoding="utf-8") == "content"
