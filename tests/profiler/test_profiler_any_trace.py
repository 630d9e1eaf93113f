"""``python -m natten_jax.profiler.trace``: readable names for a trace of any program."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from natten_jax.native import module as native
from natten_jax.profiler import trace as trace_program
from natten_jax.profiler.capture import Event
from natten_jax.profiler.program import Program, programs_in_trace
from natten_jax.profiler.report import format_time
from tests.support.compilation import users_environment
from tests.support.programs import run_command
from tests.support.traces import rows_by_module

needs_native = pytest.mark.skipif(native.path() is None, reason="the native module is not built")


def run_python(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return run_command(arguments, {**users_environment(), "JAX_PLATFORMS": "cpu"})


def test_programs_are_read_from_any_trace(tmp_path: Path) -> None:
    @jax.jit
    def step(x: jax.Array) -> jax.Array:
        with jax.named_scope("outer"):
            return jnp.sum(jnp.tanh(x @ x) * 2)

    x = jnp.ones((64, 64))
    jax.block_until_ready(step(x))
    with jax.profiler.trace(str(tmp_path)):
        jax.block_until_ready(step(x))
    (file,) = tmp_path.glob("**/*.xplane.pb")
    (found,) = (program for program in programs_in_trace(file.read_bytes()).values() if program.module == "jit_step")
    expected = Program.from_compiled(step.lower(x).compile())
    assert found.instructions.keys() == expected.instructions.keys()
    for name, instruction in expected.instructions.items():
        assert found.instruction(name).opcode == instruction.opcode
        assert found.instruction(name).fused == instruction.fused
        assert found.instruction(name).scope == instruction.scope

    output = run_python("-m", "natten_jax.profiler.trace", tmp_path)
    assert output.returncode == 0, output.stderr
    assert "jit_step" in output.stdout
    assert "gemm" in output.stdout


# Several programs, of which some share a name: kernels beside loops. On a CPU, events and the programs inside a trace
# have different numbers.
_PROGRAMS = """
import sys
import jax
import jax.numpy as jnp
import natten_jax

def named(name, function):
    function.__name__ = name
    return jax.jit(function)

def attend(i):
    return named(f"attend_{i}", lambda x: natten_jax.na1d(x, x, x, 8 + i, backend="cpu-fna"))

def loop(i):
    square = lambda x: x[0, :, 0, :] @ x[0, :, 0, :].T
    return named("loop", lambda x: jax.lax.fori_loop(0, 3, lambda _, y: jnp.sin(y) @ y + i, square(x)))

x = jnp.ones((1, 32, 2, 16))
functions = [make(i) for i in range(4) for make in (attend, loop)]
jax.block_until_ready([function(x) for function in functions])
with jax.profiler.trace(sys.argv[1]):
    for function in functions:
        jax.block_until_ready(function(x))
"""


@needs_native
def test_programs_of_a_trace_are_told_apart_by_name(tmp_path: Path) -> None:
    finished = run_python("-c", _PROGRAMS, tmp_path)
    assert finished.returncode == 0, finished.stderr
    modules = rows_by_module(tmp_path)
    for i in range(4):
        assert [row.name.operation for row in modules[f"jit_attend_{i}"]] == ["FnaForward"]
    loops = {row.name.operation: row for row in modules["jit_loop"]}
    assert loops["while"].calls == 4
    assert loops["sin"].calls == 12
    assert not any("wrapped" in operation for operation in loops)


_STEPS = """
import sys
import jax
import jax.numpy as jnp

def step(x):
    return jnp.tanh(x @ x) * 2

def other(x):
    return x @ x

functions = [jax.jit(each) for each in (step, other)]
x = jnp.ones((256, 256))
jax.block_until_ready([function(x) for function in functions])
with jax.profiler.trace(sys.argv[1]):
    for _ in range(5):
        jax.block_until_ready(functions[0](x))
    jax.block_until_ready(functions[1](x))
"""


def _is_printed(cell: str, seconds: float) -> bool:
    """Whether a cell is a time, whose last digit may be rounded either way: sums of durations depend on their order."""
    number, unit = re.fullmatch(r"([\d.]+)(us|ms|s)", format_time(seconds)).groups()  # type: ignore[union-attr]
    return cell.endswith(unit) and abs(float(cell.removesuffix(unit)) - float(number)) < 0.0015


def test_shares_add_up_and_averages_are_of_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finished = run_python("-c", _STEPS, tmp_path)
    assert finished.returncode == 0, finished.stderr
    found = trace_program.programs_of(tmp_path)
    assert {name: each.runs for name, each in found.items()} == {"jit_step": 5, "jit_other": 1}

    def table(*flags: str) -> tuple[list[list[str]], str]:
        assert trace_program.main([str(tmp_path), *flags]) == 0
        output = capsys.readouterr().out
        rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if "│" in line]
        return rows, output

    pytest.importorskip("rich")
    rows, output = table("--module", "jit_step")
    assert "Per step" in output and "# a step" in output
    assert re.search(r"^jit_step: \S+, 100\.0%; 5 runs of \S+$", output, re.MULTILINE)
    shares = [float(row[6].rstrip("%")) for row in rows]
    assert sum(shares[:-1]) == pytest.approx(100, abs=0.1 * len(rows)) and shares[-1] == 100
    in_steps = {row[3]: float(row[4]) for row in rows[:-1]}
    assert in_steps and set(in_steps.values()) == {1}
    seconds = found["jit_step"].seconds
    assert _is_printed(rows[-1][5], seconds / 5)

    _, output = table()  # of several programs: how many steps they are together is not known
    assert "Per step" not in output and "Share" in output
    assert re.search(r"^jit_other: .*; 1 run of \S+$", output, re.MULTILINE)
    rows, output = table("--steps", "2", "--json", str(tmp_path / "trace.json"))
    together = sum(each.seconds for each in found.values())
    assert _is_printed(rows[-1][5], together / 2)
    saved = json.loads((tmp_path / "trace.json").read_text())
    assert saved["steps"] == 2 and saved["runs"] == {"jit_step": 5, "jit_other": 1}


def test_traces_that_do_not_say_how_often_a_program_ran() -> None:
    told = [Event("kernel", "fusion", "", 0.0, 1e6, run=run) for run in (1, 1, 2)]
    assert trace_program._count_runs(told) == 2
    assert trace_program._count_runs([*told, Event("kernel", "fusion", "", 0.0, 1e6)]) is None
