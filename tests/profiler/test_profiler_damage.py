"""Trace files that are cut short or otherwise damaged, folders that hold none, and captures that must not mix."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import pytest
from hypothesis import strategies

from natten_jax.profiler import trace as trace_program
from natten_jax.profiler.traces import capture, trace_files, xspace
from natten_jax.profiler.traces.capture import Launch
from natten_jax.profiler.traces.program import Program
from natten_jax.profiler.traces.trace_files import CaptureError, DamagedTrace
from tests.support.protobuf import encoded, field


@pytest.fixture(scope="module")
def trace_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A whole trace, with the programs inside."""

    @jax.jit
    def step(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(x @ x) * 2)

    x = jnp.ones((8, 8))
    jax.block_until_ready(step(x))
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 1
    folder = tmp_path_factory.mktemp("trace")
    with jax.profiler.trace(str(folder), profiler_options=options):
        jax.block_until_ready(step(x))
    (file,) = folder.glob("**/*.xplane.pb")
    return file.read_bytes()


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


@pytest.mark.parametrize(
    "damage",
    [
        b"\x80",  # a number that does not end
        b"\x08" + b"\xff" * 5000 + b"\x01",  # one that never fits 64 bits
        b"\x0a\x7f\x00",  # bytes that are not all there
        b"\x0a" + b"\xff" * 9 + b"\x01",  # 2**64 bytes
        b"\x09\x00\x00",  # eight bytes that are not all there
        b"\x0d\x00\x00",  # four bytes that are not all there
        b"\x0b",  # a kind of field that protocol buffers gave up
        b"\x0e",  # a kind that does not exist
        b"\x00\x00",  # field number zero
    ],
)
def test_every_malformed_field_is_damage(damage: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.xplane.pb"
    for data in (damage, space_of(damage), space_of(field(1, damage)), space_of(field(1, field(3, damage)))):
        path.write_bytes(data)
        assert not read_or_complain(path, xspace.programs)


def test_bytes_that_are_no_program_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.xplane.pb"
    path.write_bytes(space_of(b"\x80").replace(b"Hlo Proto", b"Some data"))
    assert xspace.programs(path) == {}


def test_a_trace_cut_at_any_byte_is_read_or_damage(trace_bytes: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.xplane.pb"
    path.write_bytes(trace_bytes)
    assert any(program.module == "jit_step" for program in xspace.programs(path).values())
    were_read = 0
    for size in range(len(trace_bytes)):
        path.write_bytes(trace_bytes[:size])
        were_read += read_or_complain(path, xspace.programs)
        if size % 16 == 0:
            read_or_complain(path, trace_program.rows_by_module)
    assert were_read < 10  # those that end with a plane


def test_flipped_bytes_are_read_or_damage(trace_bytes: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.xplane.pb"
    generator = random.Random(5)
    outcomes = set()
    for _ in range(600):
        damaged = bytearray(trace_bytes)
        for _ in range(generator.randrange(1, 4)):
            damaged[generator.randrange(len(damaged))] = generator.randrange(256)
        path.write_bytes(damaged)
        outcomes.add(read_or_complain(path, trace_program.rows_by_module))
    assert outcomes == {True, False}


GPU_TRACE = """
planes {
  name: "/device:GPU:0"
  lines {
    name: "Stream #1" timestamp_ns: 5
    events {
      metadata_id: 1 offset_ps: 1000 duration_ps: 2000
      stats { metadata_id: 1 str_value: "jit_f" } stats { metadata_id: 2 ref_value: 3 }
      stats { metadata_id: 4 int64_value: 7 } stats { metadata_id: 5 %s }
    }
  }
  event_metadata { key: 1 value { id: 1 name: "kernel" } }
  stat_metadata { key: 1 value { id: 1 name: "hlo_module" } } stat_metadata { key: 2 value { id: 2 name: "hlo_op" } }
  stat_metadata { key: 3 value { id: 3 name: "fusion.1" } } stat_metadata { key: 4 value { id: 4 name: "run_id" } }
  stat_metadata { key: 5 value { id: 5 name: "program_id" } }
}
"""


@pytest.mark.parametrize(
    ("number", "is_read"),
    [
        ("uint64_value: 9", True),
        ('str_value: "nine"', True),  # nothing that a program could be found by
        (r'bytes_value: "\232"', False),  # what is neither a number nor text
    ],
)
def test_an_event_of_a_gpu_with_a_strange_number(number: str, is_read: bool, tmp_path: Path) -> None:
    path = tmp_path / "a.xplane.pb"
    path.write_bytes(jax.profiler.ProfileData.text_proto_to_serialized_xspace(GPU_TRACE % number))
    assert read_or_complain(path, trace_program.rows_by_module) == is_read
    if is_read:
        assert set(trace_program.rows_by_module(path)) == {"jit_f"}


@hypothesis.given(
    data=strategies.one_of(
        strategies.binary(max_size=200),
        strategies.binary(max_size=100).map(space_of),
        strategies.binary(max_size=100).map(lambda data: space_of(field(1, data))),
        strategies.binary(max_size=100).map(lambda data: space_of(field(1, field(3, field(2, data))))),
        strategies.binary(max_size=20).map(lambda data: space_of(module_with_fusion(data))),
    )
)
def test_random_bytes_are_read_or_damage(data: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "random.xplane.pb"
    path.write_bytes(data)
    read_or_complain(path, xspace.programs)
    read_or_complain(path, trace_program.rows_by_module)


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


def test_looking_into_the_root_walks_through_nothing() -> None:
    scanned: set[str] = set()
    is_watching = True

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if is_watching and event in ("os.scandir", "os.listdir"):
            scanned.add(str(arguments[0]))

    sys.addaudithook(note)  # for good: there is no way to take it back
    try:
        with pytest.raises(CaptureError, match="there is no trace"):
            trace_files.trace_file(Path("/"))
    finally:
        is_watching = False
    assert "/" in scanned
    assert scanned <= {"/", "/plugins", "/plugins/profile"}  # releases of Python differ in how they look for the latter


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
