"""Traces of TPUs in the form that is documented of them, with kernels of this package, loops and another program."""

from __future__ import annotations

from pathlib import Path

import pytest
from jax.profiler import ProfileData

from natten_jax.profiler import capture, trace

#: Microseconds: what ran on a device, one instruction after the other, loops around what is in them.
OPERATIONS = (
    ("%copy.1 = bf16[8,64,32]{2,1,0} copy(bf16[64,8,32]{2,1,0} %x)", 0, 10),
    ("%natten_jax_tpu_forward.1 = (bf16[8,64,32], f32[8,2,64]) custom-call(%copy.1)", 10, 40),
    ("%natten_jax_tpu_query_gradient.1 = f32[8,64,32] custom-call(%copy.1)", 50, 30),
    ("%natten_jax_tpu_key_gradients.1 = (f32[8,64,32], f32[8,64,32]) custom-call(%copy.1)", 80, 50),
    ("%while.2 = (s32[], f32[4]) while(%tuple)", 130, 20),
    ("%add_fusion = f32[4] fusion(%y), kind=kLoop", 135, 5),
    ("%add_fusion = f32[4] fusion(%y), kind=kLoop", 142, 5),
)
OTHER = (("%convolution.3 = f32[8,8] convolution(%a, %b)", 20, 7),)
RUNS = ((1000, "jit_step(77)", 5, OPERATIONS), (1200, "jit_other(78)", 6, OTHER), (1300, "jit_step(77)", 7, OPERATIONS))


def text_of(devices: int) -> str:
    """The trace, as protocol buffers are written."""
    names: dict[str, int] = {}

    def event(name: str, start: float, duration: float, *stats: str) -> str:
        number = names.setdefault(name, len(names) + 1)
        picoseconds = f"offset_ps: {int(start * 1e6)} duration_ps: {int(duration * 1e6)}"
        return f"events {{ metadata_id: {number} {picoseconds} {' '.join(stats)} }}"

    def line(name: str, *of_line: str) -> str:
        return f'lines {{ name: "{name}" timestamp_ns: 0 {" ".join(of_line)} }}'

    modules = [event(name, at, 200, f"stats {{ metadata_id: 1 int64_value: {run} }}") for at, name, run, _ in RUNS]
    operations = [event(name, at + start, length) for at, *_, inside in RUNS for name, start, length in inside]
    copies = [event("%copy-start.9", 1001, 900)]
    lines = " ".join(
        line(name, *of_line)
        for name, of_line in (("XLA Modules", modules), ("XLA Ops", operations), ("Async XLA Ops", copies))
    )
    metadata = " ".join(
        f'event_metadata {{ key: {number} value {{ id: {number} name: "{name}" }} }}' for name, number in names.items()
    )
    metadata += ' stat_metadata { key: 1 value { id: 1 name: "run_id" } }'
    planes = [f'planes {{ name: "/device:TPU:{device}" {lines} {metadata} }}' for device in range(devices)]
    return " ".join([*planes, 'planes { name: "/host:CPU" }'])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "host.xplane.pb"
    path.write_bytes(ProfileData.text_proto_to_serialized_xspace(text_of(devices=2)))
    return path


def test_kernels_have_readable_names_and_loops_only_their_own_time(file: Path) -> None:
    found = trace.programs_of(file)
    assert {name: each.runs for name, each in found.items()} == {"jit_step": 2, "jit_other": 1}
    rows = {row.name.operation: row for row in found["jit_step"].rows}
    attention = {name: row for name, row in rows.items() if row.name.category == "attention"}
    assert {name: (row.name.framework, row.calls) for name, row in attention.items()} == {
        "FnaForward": ("natten_jax-tpu", 2),
        "FnaBackward": ("natten_jax-tpu", 4),
    }
    seconds = {name: row.runtime for name, row in rows.items()}
    assert seconds["FnaForward"] == pytest.approx(80e-6) and seconds["FnaBackward"] == pytest.approx(160e-6)
    assert seconds["while"] == pytest.approx(20e-6) and seconds["add_fusion"] == pytest.approx(20e-6)
    # Copies that run beside the program are no time of its own.
    assert found["jit_step"].seconds == pytest.approx(2 * 150e-6)
    (product,) = found["jit_other"].rows
    assert product.name.category == "gemm"


def test_runs_of_a_program_are_iterations_of_each_device(file: Path) -> None:
    events = [each for each in capture.tpu_events(capture.read_trace(file)) if each.module == "jit_step"]
    devices = capture.by_device(events)
    assert list(devices) == [0, 1]
    for of_device in devices.values():
        parts = capture.split(of_device, 2)
        assert parts is not None and [len(part) for part in parts] == [len(OPERATIONS)] * 2
        assert {each.number for part in parts for each in part} == {77}


def test_the_program_prints_them(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert trace.main([str(file.parent), "--module", "jit_step"]) == 0
    printed = capsys.readouterr().out
    assert "FnaForward" in printed and "natten_jax-tpu" in printed and "2 runs of 150.000us" in printed
