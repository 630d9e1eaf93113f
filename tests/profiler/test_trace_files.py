"""Trace files: the programs in them, errors about broken files, and the search for files."""

from __future__ import annotations

import os
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from natten_jax.profiler import capture
from natten_jax.profiler import trace as trace_program
from natten_jax.profiler.capture import CaptureError, Launch
from natten_jax.profiler.program import Program, programs_in_trace
from tests.support.protobuf import encoded, field


def trace_with_program(hlo: bytes, stat: bytes = b"Hlo Proto") -> bytes:
    """Return a trace with a program, or with other bytes in a stat of another name."""
    named = field(5, field(1, 4) + field(2, field(1, 4) + field(2, stat)))
    event = field(4, field(1, 9) + field(2, field(5, field(1, 4) + field(6, hlo))))
    return field(1, field(2, b"/host:metadata") + named + event)


def test_fusions_call_computations_by_packed_numbers() -> None:
    fusion = field(1, b"fusion.1") + field(2, b"fusion") + field(38, encoded(300))
    inner = field(2, field(1, b"tanh.1") + field(2, b"tanh")) + field(5, 300)
    module = field(1, b"jit_step") + field(3, inner) + field(3, field(2, fusion) + field(5, 1))
    (program,) = programs_in_trace(trace_with_program(field(1, module))).values()
    assert program.module == "jit_step"
    assert program.instruction("fusion.1").fused == {"tanh"}


def test_other_stats_are_not_read_as_programs() -> None:
    assert programs_in_trace(trace_with_program(b"\x80", b"Some data")) == {}


def test_broken_and_missing_traces_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert trace_program.main([str(tmp_path)]) == 1
    assert "there is no trace" in capsys.readouterr().err
    broken = tmp_path / "a.xplane.pb"
    broken.write_bytes(b"\x0a\xff\xff\xff\xff\x0f\x01\x02" * 5)
    assert trace_program.main([str(broken)]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"the trace {str(broken)!r} is truncated or corrupt" in error


def test_traces_are_searched_only_in_folders_of_the_profiler(tmp_path: Path) -> None:
    for place in ("deep/er", "plugins/profile/run/more", "plugins/other"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "a.xplane.pb").write_bytes(b"")
    with pytest.raises(CaptureError, match="there is no trace"):
        capture.trace_file(tmp_path)
    for age, run in ((0, "new"), (100, "old")):
        file = tmp_path / "plugins" / "profile" / run / "host.xplane.pb"
        file.parent.mkdir()
        file.write_bytes(b"")
        os.utime(file, (time.time() - age,) * 2)
    assert capture.trace_file(tmp_path).parent.name == "new"
    assert capture.trace_file(tmp_path / "plugins" / "profile" / "old").parent.name == "old"


def test_captures_keep_their_trace_in_a_folder_with_older_ones(tmp_path: Path) -> None:
    step = jax.jit(lambda x: jnp.tanh(x) @ x).lower(jnp.ones((16, 16))).compile()
    launch = Launch(lambda: step(jnp.ones((16, 16))), Program.from_compiled(step))
    old = tmp_path / "plugins" / "profile" / "1999_12_31_23_59_59" / "host.xplane.pb"
    old.parent.mkdir(parents=True)
    old.write_bytes(b"")
    os.utime(old, (0, 0))
    (iterations,) = capture.capture_in_turns([launch], 2, "cpu", folder=tmp_path)
    assert len(iterations) == 2
    kept = {file.parent for file in (tmp_path / "plugins" / "profile").glob("*/*.xplane.pb")}
    assert len(kept) == 2
