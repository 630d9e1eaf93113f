"""``python -m natten_jax.profiler.trace``: readable names for a trace of any program."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from natten_jax.native import module as native
from natten_jax.profiler import trace as trace_program
from natten_jax.profiler.traces import xspace
from natten_jax.profiler.traces.program import Program
from natten_jax.profiler.traces.trace_files import DamagedTrace

needs_native = pytest.mark.skipif(native.path() is None, reason="the native module is not built")


def run_python(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        timeout=300,
        check=False,
    )


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
    (found,) = (program for program in xspace.programs(file).values() if program.module == "jit_step")
    expected = Program.of(step.lower(x).compile())
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
    modules = trace_program.rows_by_module(tmp_path)
    for i in range(4):
        assert [row.name.operation for row in modules[f"jit_attend_{i}"]] == ["FnaForward"]
    loops = {row.name.operation: row for row in modules["jit_loop"]}
    assert loops["while"].calls == 4
    assert loops["sin"].calls == 12
    assert not any("wrapped" in operation for operation in loops)


def test_damaged_traces_are_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert trace_program.main([str(tmp_path)]) == 1
    assert "there is no trace" in capsys.readouterr().err
    broken = tmp_path / "a.xplane.pb"
    broken.write_bytes(b"\x0a\xff\xff\xff\xff\x0f\x01\x02" * 5)
    with pytest.raises(DamagedTrace, match="truncated or corrupt"):
        xspace.programs(broken)
    assert trace_program.main([str(broken)]) == 1
    assert capsys.readouterr().err.count("\n") == 1
