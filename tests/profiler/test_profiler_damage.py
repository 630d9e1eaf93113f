"""Trace files that are cut short or otherwise damaged, folders that hold none, and captures that must not mix."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from natten_jax.profiler import trace as trace_program
from natten_jax.profiler.traces import capture, trace_files, xspace
from natten_jax.profiler.traces.capture import Launch
from natten_jax.profiler.traces.program import Program
from natten_jax.profiler.traces.trace_files import CaptureError, DamagedTrace
from tests.support.protobuf import encoded, field


def read_or_complain(path: Path, read: Callable[[Path], Any]) -> bool:
    """Whether the file was read; where not, the only error is one that names it and says what it is."""
    try:
        read(path)
    except ValueError as error:
        assert type(error) is DamagedTrace
        assert str(path) in str(error)
        assert "truncated or corrupt" in str(error)
        return False
    return True


def space_of(hlo: bytes) -> bytes:
    """A trace that holds one program, as JAX's profiler puts it there."""
    named = field(5, field(1, 4) + field(2, field(1, 4) + field(2, b"Hlo Proto")))
    event = field(4, field(1, 9) + field(2, field(5, field(1, 4) + field(6, hlo))))
    return field(1, field(2, b"/host:metadata") + named + event)


def module_with_fusion(called: bytes) -> bytes:
    """An HLO proto whose fusion calls computations of these packed numbers."""
    fusion = field(1, b"fusion.1") + field(2, b"fusion") + field(38, called)
    inner = field(2, field(1, b"tanh.1") + field(2, b"tanh")) + field(5, 300)
    computations = field(3, inner) + field(3, field(2, fusion) + field(5, 1))
    return field(1, field(1, b"jit_step") + computations)


def test_packed_numbers_are_read_and_truncated_ones_are_damage(tmp_path: Path) -> None:
    path = tmp_path / "a.xplane.pb"
    path.write_bytes(space_of(module_with_fusion(encoded(300))))
    assert xspace.programs(path)[9].instruction("fusion.1").fused == {"tanh"}
    path.write_bytes(space_of(module_with_fusion(encoded(300)[:1])))
    assert not read_or_complain(path, xspace.programs)


def test_bytes_that_are_no_program_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.xplane.pb"
    path.write_bytes(space_of(b"\x80").replace(b"Hlo Proto", b"Some data"))
    assert xspace.programs(path) == {}


def test_the_program_says_in_one_sentence_that_a_trace_is_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.xplane.pb"
    path.write_bytes(space_of(module_with_fusion(encoded(300)[:1])))
    assert trace_program.main([str(path)]) == 1
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert f"{str(path)!r} is truncated or corrupt" in captured.err


# Where traces are looked for.


def test_traces_are_looked_for_where_the_profiler_puts_them_and_nowhere_else(tmp_path: Path) -> None:
    for place in ("deep/er", "plugins/profile/run/more", "plugins/other"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "a.xplane.pb").write_bytes(b"")
    with pytest.raises(CaptureError, match="there is no trace"):
        trace_files.trace_file(tmp_path)
    for age, run in ((0, "new"), (100, "old")):
        file = tmp_path / "plugins" / "profile" / run / "host.xplane.pb"
        file.parent.mkdir()
        file.write_bytes(b"")
        os.utime(file, (time.time() - age,) * 2)
    assert trace_files.trace_file(tmp_path).parent.name == "new"
    assert trace_files.trace_file(tmp_path / "plugins" / "profile" / "old").parent.name == "old"


def test_a_capture_reads_its_own_trace_whatever_else_its_folder_holds(tmp_path: Path) -> None:
    step = jax.jit(lambda x: jnp.tanh(x) @ x).lower(jnp.ones((16, 16))).compile()
    launch = Launch(lambda: step(jnp.ones((16, 16))), Program.of(step))
    future = tmp_path / "plugins" / "profile" / "9999_12_31_23_59_59" / "host.xplane.pb"
    future.parent.mkdir(parents=True)
    future.write_bytes(b"")
    os.utime(future, (time.time() + 1e6,) * 2)
    for count in (1, 2, 3):  # within a second, too, which is how exactly the profiler names its folders
        (iterations,) = capture.capture_in_turns([launch], 2, "cpu", folder=tmp_path)
        assert len(iterations) == 2
        kept = {file.parent for file in (tmp_path / "plugins" / "profile").glob("*/*.xplane.pb")}
        assert len(kept) == count + 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["plugins"]
