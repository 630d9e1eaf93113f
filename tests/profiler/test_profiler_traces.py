"""Traces: their events, iterations, devices, programs and files. Tables that the profiler prints."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.profiler import ProfileData

import natten_jax
from natten_jax import backends
from natten_jax.backends.select import plan_with
from natten_jax.performance import TilePair
from natten_jax.plan.devices import Device
from natten_jax.plan.plan import Plan, Request
from natten_jax.problem import problem_of
from natten_jax.profiler import Result, Row, capture, measure, parse, report, symbols
from natten_jax.profiler import trace as trace_program
from natten_jax.profiler.capture import CaptureError, Event, Launch
from natten_jax.profiler.program import Instruction, Program, programs_in_trace
from tests.support.compilation import users_environment
from tests.support.native_programs import needs_native
from tests.support.programs import run_command
from tests.support.protobuf import encoded, field
from tests.support.traces import programs_of, rows_by_module


def test_overlapping_steps_share_the_time_and_containers_get_the_rest() -> None:
    program = Program("jit_f", {"while.1": Instruction("while"), "dot.1": Instruction("dot")})
    launched = [
        Event("while.1", "while.1", "", 0.0, 100.0),
        Event("a", "a", "", 10.0, 20.0),
        Event("b", "b", "", 20.0, 30.0),
        Event("empty", "empty", "", 60.0, 0.0),
        Event("dot.1", "dot.1", "", 150.0, 50.0),
    ]
    durations = [event.duration for event in capture.without_overlap(launched, program.is_container)]
    assert durations == [60.0, 15.0, 25.0, 0.0, 50.0]
    assert sum(durations) == 150.0  # the time during which at least one event ran
    assert capture.without_overlap([], program.is_container) == []


def events(names: str, runs: list[Any]) -> list[Any]:
    return [
        Event(name, name, "", float(i), 1.0, run=run) for i, (name, run) in enumerate(zip(names, runs, strict=True))
    ]


def test_events_are_split_into_iterations() -> None:
    def named(parts: list[list[Any]] | None) -> list[str] | None:
        return None if parts is None else ["".join(event.symbol for event in part) for part in parts]

    assert named(capture.split(events("abcab", [7, 7, 7, 8, 8]), 2)) == ["abc", "ab"]
    assert capture.split(events("abab", [7, 7, 8, 8]), 3) is None
    assert named(capture.split(events("abba", [None] * 4), 2)) == ["ab", "ba"]
    assert named(capture.split(events("abba", [None] * 4)[::-1], 2)) == ["ab", "ba"]
    assert capture.split(events("aabb", [None] * 4), 2) is None
    assert capture.split(events("aba", [None] * 3), 2) is None


def test_time_that_a_kernel_waits_for_the_one_before_it_is_not_its_own() -> None:
    def event(name: str, start: float, end: float) -> Any:
        return SimpleNamespace(name=name, start_ns=start, end_ns=end, duration_ns=end - start, stats=[])

    stream = SimpleNamespace(name="Stream #1", events=[event("b", 60.0, 130.0), event("a", 0.0, 100.0)])
    other = SimpleNamespace(name="Stream #2", events=[event("c", 60.0, 130.0)])
    profile: Any = SimpleNamespace(planes=[SimpleNamespace(name="/device:GPU:0", lines=[stream, other])])
    durations = {each.symbol: each.duration for each in capture.gpu_events(profile)}
    assert durations == {"a": 100.0, "b": 30.0, "c": 70.0}


def compiled_attention() -> tuple[Callable[[], Any], Program]:
    query, key, value = (jax.random.normal(jax.random.key(i), (1, 768, 4, 64)) for i in range(3))
    compiled = jax.jit(jax.nn.dot_product_attention).lower(query, key, value).compile()
    return lambda: compiled(query, key, value), Program.from_compiled(compiled)


def test_device_time_is_most_of_the_wall_clock() -> None:
    run, program = compiled_attention()
    other = jax.jit(lambda x: jnp.tanh(x) @ x)
    walls = []

    def timed() -> None:
        jax.block_until_ready(other(jnp.ones((512, 512))))  # events of this other program must not be counted
        start = time.perf_counter()
        jax.block_until_ready(run())
        walls.append(time.perf_counter() - start)

    timed()
    iterations = capture.capture(timed, 9, program, "cpu")
    assert len(iterations) == 9
    totals = [sum(event.duration for event in each) / 1e9 for each in iterations]
    # The trace and the wall clock measure the same runs. For a single run, their times may differ: a busy machine may
    # suspend this thread, or the thread that records the end of a step.
    ratio = statistics.median(total / wall for total, wall in zip(totals, walls[-9:], strict=True))
    assert 0.5 < ratio < 1.1


def test_a_trace_without_events_is_retried_then_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture.time, "sleep", lambda _: None)
    run, program = compiled_attention()
    calls = []

    def counted() -> Any:
        calls.append(1)
        return run()

    with pytest.raises(CaptureError, match="contains no operation"):
        capture.capture(counted, 2, Program("jit_other", {}), "cpu")
    assert len(calls) == 10
    assert capture.capture(counted, 1, program, "cpu")[0]


def test_rows_take_the_median_of_the_iterations() -> None:
    program = Program("jit_f", {})
    iterations = [
        [
            Event("add_1", "", "", 0, 1000.0),
            Event("add_2", "", "", 0, factor * 1000.0),
            Event("mul", "", "", 0, 10000.0),
        ]
        for factor in (1, 2, 9)
    ]
    rows = measure.summarize(iterations, program, "fna", "cuda")
    assert [(row.name.operation, row.calls, row.runtime) for row in rows] == [("mul", 1, 1e-5), ("add", 2, 3e-6)]
    assert rows[1].symbols == ("add_1", "add_2")


# Reports.
def test_times() -> None:
    seconds = 1.2344, 61.0, 0.0012345, 0.9999994, 0.9999999, 0.000999, 1.5e-9, 0.0
    texts = "1.234s", "61.000s", "1.234ms", "999.999ms", "1.000s", "999.000us", "0.002us", "0.000us"
    assert tuple(map(report.format_time, seconds)) == texts


def a_result(rows: int) -> Result:
    names = [
        symbols.Name("XLA", "elementwise", "-", f"{i} [b]x[/] " + "name of an operation " * 2) for i in range(rows)
    ]
    listed = tuple(Row(name, 1, (1e-6 * (i + 1), 2e-6 * (i + 1)), ("x",)) for i, name in enumerate(names))
    totals = tuple(sum(row.runtimes[i] for row in listed) for i in range(2))
    options = parse(["-i", "8", "-w", "3"])
    return Result(options, {"forward": a_plan("cpu-fna", Device("cpu"))}, Device("cpu"), listed, {0: totals})


def a_plan(backend: str, device: Device, pair: TilePair = ((4,), (6,))) -> Plan:
    window = 3 if len(pair[0]) == 1 else 9
    request = Request(problem_of((64,) * len(pair[0]), window))
    plan = plan_with(backends.find(backend, "fna"), request, device, "forward")
    return dataclasses.replace(plan, performance=plan.performance.with_tiles("forward", pair))


@pytest.mark.parametrize("has_rich", [True, False])
def test_table_fits_and_adds_up(has_rich: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if has_rich:
        pytest.importorskip("rich")
    else:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    file = io.StringIO()
    report.print_report(a_result(3), file)
    text = file.getvalue()
    assert "\x1b" not in text
    assert text.isascii() or has_rich
    assert all(len(line) <= 100 for line in text.splitlines())
    assert "[b]x[/]" in text
    for part in ("Profiler results", "Framework", "Kernel category", "Arch", "Operation", "# calls", "Runtime"):
        assert part in text
    assert [time_ in text for time_ in ("1.500us", "3.000us", "4.500us", "9.000us")] == [True] * 4


def test_long_tables_are_cut_but_add_up() -> None:
    result = a_result(30)
    table = report.result_table(result)
    assert len(table.rows) == 20
    assert table.rows[-1][3:5] == ("11 other operations", "11")
    assert table.footer[-1] == report.format_time(sum(row.runtime for row in result.rows))
    assert len(report.to_json(result)["rows"]) == 30


@pytest.mark.parametrize(
    ("backend", "device", "occupancy"),
    [
        ("cpu-fna", Device("cpu"), None),
        ("cutlass-fna", Device("cuda", (9, 0)), 2),
        ("hopper-fna", Device("cuda", (9, 0)), 1),
        ("cutlass-fna", Device("cuda", (12, 0)), None),
    ],
)
def test_results_name_tile_sizes_and_known_occupancy(backend: str, device: Device, occupancy: int | None) -> None:
    plan = a_plan(backend, device, ((16, 8), (8, 8)))
    result = dataclasses.replace(a_result(1), plans={"forward": plan}, device=device)
    found = report.to_json(result)["tiles"]["forward"]
    assert found == {"query": (16, 8), "key_value": (8, 8), "tile_m": 128, "tile_n": 64, "occupancy": occupancy}


# The command ``python -m natten_jax.profiler.trace``, which prints readable names for a trace of any program.


def run_program(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return run_command(arguments, {**users_environment(), "JAX_PLATFORMS": "cpu"})


def test_programs_are_read_from_any_trace(tmp_path: Path) -> None:
    @jax.jit
    def step(x: jax.Array) -> jax.Array:
        with jax.named_scope("outer"):
            return jnp.sum(jnp.tanh(x @ x) * 2)

    x = jnp.ones((64, 64))
    traced(tmp_path, [step], x)
    (file,) = tmp_path.glob("**/*.xplane.pb")
    (found,) = (program for program in programs_in_trace(file.read_bytes()).values() if program.module == "jit_step")
    expected = Program.from_compiled(step.lower(x).compile())
    assert found.instructions.keys() == expected.instructions.keys()
    for name, instruction in expected.instructions.items():
        assert found.instruction(name).opcode == instruction.opcode
        assert found.instruction(name).fused == instruction.fused
        assert found.instruction(name).scope == instruction.scope

    output = run_program("-m", "natten_jax.profiler.trace", tmp_path)
    assert output.returncode == 0, output.stderr
    assert "jit_step" in output.stdout
    assert "gemm" in output.stdout


@needs_native
def test_programs_of_a_trace_are_identified_by_name(tmp_path: Path) -> None:
    """Trace several programs with kernels or loops, some with equal names.

    In a CPU trace, the program number in an event differs from the number under which the trace stores the program.
    """

    def named(name: str, function: Any) -> Any:
        function.__name__ = name
        return jax.jit(function)

    def attend(i: int) -> Any:
        return named(f"attend_{i}", lambda x: natten_jax.na1d(x, x, x, 8 + i, backend="cpu-fna"))

    def loop(i: int) -> Any:
        square = lambda x: x[0, :, 0, :] @ x[0, :, 0, :].T  # noqa: E731
        return named("loop", lambda x: jax.lax.fori_loop(0, 3, lambda _, y: jnp.sin(y) @ y + i, square(x)))

    traced(tmp_path, [make(i) for i in range(4) for make in (attend, loop)], jnp.ones((1, 32, 2, 16)))
    modules = rows_by_module(tmp_path)
    for i in range(4):
        assert [row.name.operation for row in modules[f"jit_attend_{i}"]] == ["FnaForward"]
    loops = {row.name.operation: row for row in modules["jit_loop"]}
    assert loops["while"].calls == 4
    assert loops["sin"].calls == 12
    assert not any("wrapped" in operation for operation in loops)


def traced(folder: Path, functions: list[Any], x: jax.Array) -> None:
    """Compile each function, then write a trace in which each is called once."""
    jax.block_until_ready([function(x) for function in functions])
    with jax.profiler.trace(str(folder)):
        for function in functions:
            jax.block_until_ready(function(x))


def _is_printed(cell: str, seconds: float) -> bool:
    """Return True if a table cell shows this time. The rightmost digit may differ by one (order of sums)."""
    number, unit = re.fullmatch(r"([\d.]+)(us|ms|s)", report.format_time(seconds)).groups()  # type: ignore[union-attr]
    return cell.endswith(unit) and abs(float(cell.removesuffix(unit)) - float(number)) < 0.0015


def test_shares_add_up_and_averages_are_of_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    @jax.jit
    def step(x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ x) * 2

    @jax.jit
    def other(x: jax.Array) -> jax.Array:
        return x @ x

    traced(tmp_path, [step] * 5 + [other], jnp.ones((256, 256)))
    found = programs_of(tmp_path)
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

    _, output = table()  # with several programs, the number of steps is unknown
    assert "Per step" not in output and "Share" in output
    assert re.search(r"^jit_other: .*; 1 run of \S+$", output, re.MULTILINE)
    rows, output = table("--steps", "2", "--json", str(tmp_path / "trace.json"))
    together = sum(each.seconds for each in found.values())
    assert _is_printed(rows[-1][5], together / 2)
    saved = json.loads((tmp_path / "trace.json").read_text())
    assert saved["steps"] == 2 and saved["runs"] == {"jit_step": 5, "jit_other": 1}


def test_traces_without_the_number_of_runs() -> None:
    name = symbols.Name("XLA", "elementwise", "-", "fusion")
    told = [(name, Event("kernel", "fusion", "", 0.0, 1e6, run=run)) for run in (1, 1, 2)]
    assert trace_program.TracedProgram(told).runs == 2
    assert trace_program.TracedProgram([*told, (name, Event("kernel", "fusion", "", 0.0, 1e6))]).runs is None


# TPU traces in the documented format. They contain kernels of this package, loops, and a second program.


@pytest.fixture
def trace_path(tmp_path: Path) -> Path:
    """Write a TPU trace of two devices, with two runs of the program ``jit_step`` and one run of ``jit_other``."""
    text = (Path(__file__).parents[1] / "data" / "tpu_trace.textproto").read_text(encoding="utf-8")
    path = tmp_path / "host.xplane.pb"
    path.write_bytes(ProfileData.text_proto_to_serialized_xspace(text))
    return path


def test_kernels_have_readable_names_and_loops_only_their_own_time(trace_path: Path) -> None:
    found = programs_of(trace_path)
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
    # The time of a program does not include asynchronous copies.
    assert found["jit_step"].seconds == pytest.approx(2 * 150e-6)
    (product,) = found["jit_other"].rows
    assert product.name.category == "gemm"


def test_runs_of_a_program_are_iterations_of_each_device(trace_path: Path) -> None:
    events = [each for each in capture.tpu_events(ProfileData.from_file(str(trace_path))) if each.module == "jit_step"]
    devices = capture.by_device(events)
    assert list(devices) == [0, 1]
    for device_events in devices.values():
        parts = capture.split(device_events, 2)
        assert parts is not None and [len(part) for part in parts] == [7, 7]
        assert {each.number for part in parts for each in part} == {77}


def test_the_program_prints_them(trace_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert trace_program.main([str(trace_path.parent), "--module", "jit_step"]) == 0
    printed = capsys.readouterr().out
    assert "FnaForward" in printed and "natten_jax-tpu" in printed and "2 runs of 150.000us" in printed


# Trace files: programs that they contain, and the search for trace files in folders.


def trace_with_program(hlo: bytes, stat: bytes = b"Hlo Proto") -> bytes:
    """Return a trace with ``hlo`` in a stat of the name ``stat``. Stats with the default name are read as programs."""
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


def test_a_missing_trace_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert trace_program.main([str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert "there is no trace" in error and error.count("\n") == 1


def test_traces_are_searched_only_in_folders_of_the_profiler(tmp_path: Path) -> None:
    for place in ("deep/er", "plugins/profile/run/more", "plugins/other"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "a.xplane.pb").write_bytes(b"")
    with pytest.raises(CaptureError, match="there is no trace"):
        capture.traced_runs(tmp_path)
    for age, run in ((0, "new"), (100, "old")):
        file = tmp_path / "plugins" / "profile" / run / "host.xplane.pb"
        file.parent.mkdir()
        file.write_bytes(b"")
        os.utime(file, (time.time() - age,) * 2)
    assert [file.parent.name for (file,) in capture.traced_runs(tmp_path)] == ["new", "old"]
    assert capture.traced_runs(tmp_path / "plugins" / "profile" / "old")[0][0].parent.name == "old"


def test_runs_without_events_are_passed_over_and_the_busiest_host_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = jax.jit(jnp.tanh)
    for name, calls in (("a", 1), ("b", 40), ("empty", 0)):
        with jax.profiler.trace(str(tmp_path / name)):
            for _ in range(calls):
                step(jnp.ones((200, 200))).block_until_ready()
        run = tmp_path / "plugins" / "profile" / ("new" if name == "empty" else "old")
        run.mkdir(parents=True, exist_ok=True)
        (trace,) = (tmp_path / name).rglob("*.xplane.pb")
        trace.rename(run / f"{name}.xplane.pb")
    assert trace_program.main([str(tmp_path)]) == 0
    assert "2 hosts: this is b.xplane.pb" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "what"), [("vm.trace.json.gz", "Perfetto"), ("memory.prof", "memory"), ("vm.xplane.pb", "incomplete")]
)
def test_other_files_are_named(name: str, what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / name).write_bytes(b"\x1f\x8b\xff")
    assert trace_program.main([str(tmp_path / name)]) == 1
    error = capsys.readouterr().err
    assert what in error and error.count("\n") == 1


def test_captures_keep_their_trace_in_a_folder_with_older_ones(tmp_path: Path) -> None:
    step = jax.jit(lambda x: jnp.tanh(x) @ x).lower(jnp.ones((16, 16))).compile()
    launch = Launch(lambda: step(jnp.ones((16, 16))), Program.from_compiled(step))
    old = tmp_path / "plugins" / "profile" / "1999_12_31_23_59_59" / "host.xplane.pb"
    old.parent.mkdir(parents=True)
    old.write_bytes(b"")
    os.utime(old, (0, 0))
    (devices,) = capture.capture_by_device([launch], 2, "cpu", folder=tmp_path)
    assert len(devices[0]) == 2
    kept = {file.parent for file in (tmp_path / "plugins" / "profile").glob("*/*.xplane.pb")}
    assert len(kept) == 2
