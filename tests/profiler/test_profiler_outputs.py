"""Output files, folders, links, devices and pipes of the command line programs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from natten_jax.profiler.report import write_file
from tests.support.compilation import users_environment


def test_files_are_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for content in ("first", "\u00e9", b"\xff"):
        write_file(path, content)
        assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert os.listdir(tmp_path) == ["a.json"]
    with pytest.raises(OSError, match="No such file"):
        write_file(tmp_path / "no" / "a.json", "")


def test_links_and_devices_are_written_to(tmp_path: Path) -> None:
    link, target = tmp_path / "link", tmp_path / "target"
    link.symlink_to(target)
    write_file(link, "content")
    assert link.is_symlink()
    assert target.read_text() == "content"
    write_file(Path(os.devnull), "content")
    assert Path(os.devnull).is_char_device()


@pytest.mark.parametrize("program", ["profiler -i 8 16 24 -w 2 4 4 --dry-run --max-configs 0", "doctor"])
def test_readers_may_exit_early(program: str) -> None:
    command = f"{sys.executable} -m natten_jax.{program} | head -n 1"
    environment = {**users_environment(), "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(
        command, shell=True, capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""
