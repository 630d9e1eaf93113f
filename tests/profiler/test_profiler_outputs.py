"""Output files, folders, links, devices and pipes of the command line programs."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from natten_jax.profiler import __main__ as profiler
from natten_jax.profiler import arguments
from natten_jax.profiler import trace as trace_program
from natten_jax.profiler.cli import Parser
from natten_jax.profiler.report import write_file
from tests.support.compilation import users_environment

PROGRAMS: dict[str, tuple[Callable[[Sequence[str]], int], list[str], list[str]]] = {
    "profiler": (profiler.main, ["-i", "8"], ["--json", "--csv", "--plot"]),
    "trace": (trace_program.main, ["nothing.xplane.pb"], ["--json", "--csv"]),
}


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is refused must be refused before any work."""

    def work(*_: object, **__: object) -> None:
        raise AssertionError("this must not be reached")

    monkeypatch.setattr(profiler, "_run", work)
    monkeypatch.setattr(trace_program, "programs_of", work)


def refusal(command: list[str], main: Callable[[Sequence[str]], int], capsys: pytest.CaptureFixture[str]) -> str:
    """The one sentence with which a program ends with status 2."""
    with pytest.raises(SystemExit) as exit_:
        main(command)
    assert exit_.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert ": error: " in captured.err
    return captured.err


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/", "'/' is a folder, not a file"),
        (".", "'.' is a folder, not a file"),
        ("", "'.' is a folder, not a file"),
        ("no/such/folder/x.png", "the folder 'no/such/folder' does not exist"),
        ("file/x.png", "the folder 'file' does not exist"),
        ("n" * 300 + ".png", "cannot be written: File name too long"),
        ("/proc/x.png", "cannot be written"),
    ],
)
@pytest.mark.parametrize("program", PROGRAMS)
def test_files_that_cannot_be_written_are_refused_at_once(
    program: str,
    path: str,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    main, required, flags = PROGRAMS[program]
    for flag in flags:
        error = refusal([*required, flag, path], main, capsys)
        assert f"{flag}: " in error
        assert message in error
    assert os.listdir() == ["file"]


@pytest.mark.parametrize("program", PROGRAMS)
def test_one_file_for_two_results_is_refused(
    program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    main, required, _ = PROGRAMS[program]
    error = refusal([*required, "--json", "a", "--csv", "./a"], main, capsys)
    assert "--json and --csv name the same file" in error


@pytest.mark.parametrize("name", ["x.unknown", "x.png.txt", "x.py"])
def test_charts_of_no_known_format_are_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    error = refusal(["-i", "8", "--plot", str(tmp_path / name)], profiler.main, capsys)
    assert f"{name}' is of no known format; choose one of" in error
    assert " png," in error
    for known in ("x.png", "x.PDF", "x"):
        assert arguments.chart_problem(tmp_path / known) is None


def test_a_chart_without_matplotlib_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("matplotlib", "matplotlib.backend_bases"):
        monkeypatch.setitem(sys.modules, name, None)
    error = refusal(["-i", "8", "--plot", "x.png"], profiler.main, capsys)
    assert "--plot: it needs matplotlib: pip install matplotlib" in error


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("file", "file' is a file, not a folder"),
        ("file/deeper/trace", "file' is a file, not a folder"),
        ("/proc/trace", "cannot be written"),
    ],
)
def test_trace_folders_that_cannot_be_made_are_refused(
    path: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    error = refusal(["-i", "8", "--trace-dir", path], profiler.main, capsys)
    assert "--trace-dir: " in error
    assert message in error


def test_checking_leaves_the_file_system_as_it_is(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    kept.write_text("before")
    os.mkfifo(tmp_path / "pipe")
    files = (kept, tmp_path / "new.json", Path(os.devnull), tmp_path / "pipe")  # no reader of the pipe is waited for
    parser = Parser()
    parser.check_files(argparse.Namespace(**{f"f{i}": path for i, path in enumerate(files)}), ["f0", "f1", "f2", "f3"])
    assert arguments.folder_problem(tmp_path / "deep" / "er") is None
    assert kept.read_text() == "before"
    assert {path.name for path in tmp_path.iterdir()} == {"kept.json", "pipe"}


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
