"""The profiler at its limits: problems too large for any machine, and Ctrl-C."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import pytest

import natten_jax
from natten_jax.profiler import parse, predict, workload
from natten_jax.profiler.__main__ import main
from tests.support.programs import run_command

TOO_LARGE = "the problem is too large for this machine: its operands and results take 524,288.0 GiB, and cpu has "


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (f"-i {2**40} -w 3", TOO_LARGE),
        (f"-i {2**40} -w 3 --backend flex-fna", TOO_LARGE),
        (f"-i {2**40} -w 3 --compare xla", TOO_LARGE),
        (f"-i {2**62} -w 3", "of shape (1, 4611686018427387904, 1, 64) has more elements than XLA can count"),
        (f"-i 8 -n {2**62} --dtype fp32 --compare xla", "has more elements than XLA can count"),
        (f"-i 8 --add-kv {2**62}", "has more elements than XLA can count"),
        (f"-i {2**40} -w 3 --optimize", TOO_LARGE),
        (f"-i {2**62} -w 3 --optimize", "has more elements than XLA can count"),
    ],
)
def test_problems_that_no_memory_holds_are_one_sentence(problem: str, message: str) -> None:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    finished = run_command(["-m", "natten_jax.profiler", *problem.split()], environment)
    assert finished.returncode == 1
    complaint = finished.stderr.splitlines()[-1]
    assert complaint.startswith("natten-jax-profiler: error: ")
    assert message in complaint
    assert "Traceback" not in finished.stderr


class FakeDevice(NamedTuple):
    """A GPU with so much memory, and what else is asked of it."""

    bytes_limit: int
    platform: str = "gpu"

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_in_use": 0, "bytes_limit": self.bytes_limit}


@pytest.mark.parametrize(
    ("problem", "elements"),
    [
        ("-i 8 12 -n 6 --heads-kv 2 -d 32 --dim-value 64", 96 * (6 * 32 + 2 * (32 + 64) + 6 * 64)),
        ("-i 96 -n 2 -d 16 --add-kv 5", 2 * 16 * (4 * 96 + 2 * 5)),
        ("-i 96 -n 2 -d 16 --add-kv 5 --backprop", 2 * 2 * 16 * (4 * 96 + 2 * 5)),
    ],
)
def test_operands_and_results_fit_the_memory_of_the_device(
    problem: str, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for dtype, width in (("bf16", 2), ("fp32", 4)):
        options = parse([*problem.split(), "--dtype", dtype])
        needed = elements * width
        monkeypatch.setattr(workload, "default_jax_device", lambda needed=needed: FakeDevice(needed))
        workload.check_fits(options)
        monkeypatch.setattr(workload, "default_jax_device", lambda needed=needed: FakeDevice(needed - 1))
        with pytest.raises(MemoryError, match="its operands and results take"):
            workload.check_fits(options)


def test_devices_hold_their_share_and_parts_of_the_host_all(monkeypatch: pytest.MonkeyPatch) -> None:
    options = dataclasses.replace(parse(["-i", "64", "--batch-size", "4", "--dtype", "fp32"]), devices=4)
    of_each = 4 * 64 * 64 * 4
    mesh = jax.sharding.AbstractMesh((4,), ("devices",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("devices"))
    monkeypatch.setattr(workload, "sharding_of", lambda options, shape: sharding)
    with monkeypatch.context() as on_gpus:
        on_gpus.setattr(workload, "default_jax_device", lambda: FakeDevice(of_each))
        workload.check_fits(options)
    for pages, expected in ((4 * of_each, contextlib.nullcontext()), (4 * of_each - 1, pytest.raises(MemoryError))):
        monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": pages}.__getitem__)
        with expected:
            workload.check_fits(options)


@pytest.mark.parametrize("mode", ["", "--optimize", "--compare xla", "--backprop"])
def test_what_does_not_fit_is_refused_before_anything_is_made(
    mode: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("XLA was asked")

    monkeypatch.setattr(workload, "make_inputs", fail)
    monkeypatch.setattr(jax, "jit", fail)
    monkeypatch.setattr(workload, "default_jax_device", lambda: FakeDevice(1 << 10))
    assert main(["-i", "8", "-w", "3", *mode.split()]) == 1
    complaint = capsys.readouterr().err.splitlines()[-1]
    assert complaint == (
        "natten-jax-profiler: error: the problem is too large for this machine: "
        "its operands and results take 0.0 GiB, and cpu has 0.0 GiB"
    )


@pytest.mark.parametrize("error", [MemoryError(), OverflowError("too large to convert")])
def test_arithmetic_that_fails_is_a_sentence(
    error: Exception, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(predict, "print_dry_run", fail)
    assert main(["-i", "8", "-w", "3", "--dry-run"]) == 1
    complaint = capsys.readouterr().err
    reason = f": {error}" if str(error) else ""
    assert complaint == f"natten-jax-profiler: error: the problem is too large for this machine{reason}\n"


# Ctrl-C.


def interrupted(code: str, marker: Path, arguments: str) -> subprocess.CompletedProcess[str]:
    """The profiler after a SIGINT, which it gets as soon as what ``code`` changed in it has made ``marker``."""
    # A shell's background jobs, and what they start, would ignore the signal.
    command = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    command += f"import pathlib, time; marker = pathlib.Path({str(marker)!r})\n{code}\n"
    command += f"import runpy, sys; sys.argv[1:] = {arguments.split()!r}; "
    command += "runpy.run_module('natten_jax.profiler', run_name='__main__', alter_sys=True)"
    process = subprocess.Popen(
        [sys.executable, "-c", command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    while not marker.exists() and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=300)
    return subprocess.CompletedProcess([], process.returncode, output, errors)


#: Makes the marker once so many measurements are over, and then dawdles in the next one.
DAWDLING_SEARCH = """
from natten_jax.profiler.search import _Search
measure = _Search.measure
def dawdle(self, *arguments):
    if len(self.trials) >= {trials}:
        marker.touch()
        for _ in range(3000): time.sleep(0.1)
    return measure(self, *arguments)
_Search.measure = dawdle
"""
SEARCH = "-i 8 12 -n 2 -d 16 -w 4 6 --dtype fp32 --optimize --warmup-steps 1 --iterations 2"


@pytest.mark.parametrize("more", ["", "--backprop", "--backprop --backend cpu-fna"])
def test_an_interrupted_search_keeps_the_best_so_far(more: str, tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    code = DAWDLING_SEARCH.format(trials=3)
    finished = interrupted(code, tmp_path / "marker", f"{SEARCH} {more} --json {path}")
    assert finished.returncode == 130
    assert finished.stderr.splitlines()[-1] == "natten-jax-profiler: interrupted; this is the best so far"
    assert "Traceback" not in finished.stderr
    for part in ("Best configuration", "measurements in", "natten_jax.load_tuned("):
        assert part in finished.stdout
    assert "Profiler results" not in finished.stdout
    found = json.loads(path.read_text())
    assert found["search"]["is_complete"] is False
    trials = [trial for trial in found["search"]["trials"] if trial["seconds"] is not None]
    passes = ["forward", "backward"] if "--backprop" in more else ["forward"]
    candidates = [trial for trial in trials if trial["passes"] == passes] or trials
    assert found["search"]["best_seconds"] == min(trial["seconds"] for trial in candidates)
    assert found["arguments"]["backprop"] == ("--backprop" in more)
    tuned = natten_jax.load_tuned(path)
    best = min(candidates, key=lambda trial: trial["seconds"])
    assert tuned.items() >= {name: best[name] for name in ("backend",) if name in best}.items()
    x = jax.numpy.ones((1, 8, 12, 2, 16))
    assert natten_jax.na2d(x, x, x, (4, 6), **tuned).shape == x.shape


def test_a_search_that_is_interrupted_while_the_best_is_profiled_keeps_it(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    code = (
        "from natten_jax.profiler import measure\n"
        "def dawdle(*_):\n"
        "    marker.touch()\n"
        "    for _ in range(3000): time.sleep(0.1)\n"
        "measure.profile = dawdle"
    )
    finished = interrupted(code, tmp_path / "marker", f"{SEARCH} --backend flex-fna --json {path}")
    assert finished.returncode == 130, finished.stderr
    found = json.loads(path.read_text())
    assert found["search"]["is_complete"] is True
    assert natten_jax.load_tuned(path)["backend"] == "flex-fna"


def test_a_search_that_is_interrupted_before_anything_was_measured_says_so(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    finished = interrupted(DAWDLING_SEARCH.format(trials=0), tmp_path / "marker", f"{SEARCH} --json {path}")
    assert (finished.returncode, finished.stdout) == (130, "")
    assert finished.stderr == "natten-jax-profiler: interrupted\n"
    assert not path.exists()


#: Makes the marker when XLA starts to compile.
MARKED_COMPILATION = """
import jax
compile = jax.stages.Lowered.compile
def mark(self, *arguments, **options):
    marker.touch()
    return compile(self, *arguments, **options)
jax.stages.Lowered.compile = mark
"""


def test_a_search_that_is_interrupted_while_it_compiles_ends_as_any_other(tmp_path: Path) -> None:
    problem = "-i 96 96 -n 4 -w 24 24 --dtype fp32 --backprop --backend flex-fna --optimize"
    finished = interrupted(MARKED_COMPILATION, tmp_path / "marker", problem)
    assert (finished.returncode, finished.stdout) == (130, "")
    assert finished.stderr == "natten-jax-profiler: interrupted\n"
