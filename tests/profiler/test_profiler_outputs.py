"""Where the command line programs write: refused at once where they cannot, and left early without a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from natten_jax.profiler import __main__ as profiler
from natten_jax.profiler import trace as trace_program
from natten_jax.profiler.cli import outputs
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


def refusal(arguments: list[str], main: Callable[[Sequence[str]], int], capsys: pytest.CaptureFixture[str]) -> str:
    """The one sentence with which a program ends with status 2."""
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
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
    main, arguments, flags = PROGRAMS[program]
    for flag in flags:
        error = refusal([*arguments, flag, path], main, capsys)
        assert f"{flag}: " in error
        assert message in error
    assert os.listdir() == ["file"]


@pytest.mark.parametrize("program", PROGRAMS)
def test_one_file_for_two_results_is_refused(
    program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    main, arguments, _ = PROGRAMS[program]
    error = refusal([*arguments, "--json", "a", "--csv", "./a"], main, capsys)
    assert "--json and --csv name the same file" in error


@pytest.mark.parametrize("name", ["x.unknown", "x.png.txt", "x.py"])
def test_charts_of_no_known_format_are_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    error = refusal(["-i", "8", "--plot", str(tmp_path / name)], profiler.main, capsys)
    assert f"{name}' is of no known format; choose one of" in error
    assert " png," in error
    for known in ("x.png", "x.PDF", "x"):
        assert outputs.chart_problem(tmp_path / known) is None


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


def test_asking_leaves_nothing_behind_and_changes_nothing(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    kept.write_text("before")
    assert outputs.file_problem(kept) is None
    assert outputs.file_problem(tmp_path / "new.json") is None
    assert outputs.folder_problem(tmp_path / "deep" / "er") is None
    assert outputs.file_problem(Path(os.devnull)) is None
    os.mkfifo(tmp_path / "pipe")
    assert outputs.file_problem(tmp_path / "pipe") is None  # without waiting for a reader
    assert kept.read_text() == "before"
    assert {path.name for path in tmp_path.iterdir()} == {"kept.json", "pipe"}


# Readers that leave early.


def piped(command: str) -> subprocess.CompletedProcess[str]:
    """A command whose reader leaves after a line, or before the first."""
    environment = {**users_environment(), "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
    return subprocess.run(
        command, shell=True, capture_output=True, text=True, env=environment, timeout=300, check=False
    )


@pytest.mark.parametrize("arguments", ["", "--problem -i 8 16 -w 3 3 --backprop"])
def test_the_doctors_reader_may_leave_early(arguments: str) -> None:
    finished = piped(f"{sys.executable} -m natten_jax.doctor {arguments} | head -n 1")
    assert finished.stdout.count("\n") == 1
    assert finished.stderr == ""
    assert piped(f"{sys.executable} -m natten_jax.doctor {arguments} | true").stderr == ""


def test_the_readers_of_a_trace_may_leave_early(tmp_path: Path) -> None:
    code = (
        "import jax, sys; f = jax.jit(lambda x: x @ x); x = jax.numpy.ones((8, 8)); f(x)\n"
        "with jax.profiler.trace(sys.argv[1]): jax.block_until_ready(f(x))"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=300)
    finished = piped(f"{sys.executable} -m natten_jax.profiler.trace {tmp_path} | head -n 1")
    assert finished.stdout.count("\n") == 1
    assert finished.stderr == ""
    assert piped(f"{sys.executable} -m natten_jax.profiler.trace {tmp_path} | true").stderr == ""
