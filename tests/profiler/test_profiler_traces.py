"""What the profiler makes of traces, and the tables it prints of them."""

from __future__ import annotations

import dataclasses
import io
import statistics
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from natten_jax import backends
from natten_jax.backends.select import plan_with
from natten_jax.performance import TilePair
from natten_jax.plan.devices import Device
from natten_jax.plan.plan import Plan, Request
from natten_jax.problem import problem_of
from natten_jax.profiler import Result, Row, capture, measure, parse, report, symbols
from natten_jax.profiler.capture import CaptureError, Event
from natten_jax.profiler.program import Instruction, Program


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
    assert sum(durations) == 150.0  # the time in which anything ran
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
        jax.block_until_ready(other(jnp.ones((512, 512))))  # another program's events are not counted
        start = time.perf_counter()
        jax.block_until_ready(run())
        walls.append(time.perf_counter() - start)

    timed()
    iterations = capture.capture(timed, 9, program, "cpu")
    assert len(iterations) == 9
    totals = [sum(event.duration for event in each) / 1e9 for each in iterations]
    # Both clocks watch the same runs. Single ones may disagree: a busy machine may put the thread that notes the end
    # of a step, or this one, to sleep.
    ratio = statistics.median(total / wall for total, wall in zip(totals, walls[-9:], strict=True))
    assert 0.5 < ratio < 1.1


def test_a_trace_without_events_is_retried_then_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture.time, "sleep", lambda _: None)
    run, program = compiled_attention()
    calls = []

    def counted() -> Any:
        calls.append(1)
        return run()

    with pytest.raises(CaptureError, match="recorded nothing"):
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


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (1.2344, "1.234s"),
        (61.0, "61.000s"),
        (0.0012345, "1.234ms"),
        (0.9999994, "999.999ms"),
        (0.9999999, "1.000s"),
        (0.000999, "999.000us"),
        (1.5e-9, "0.002us"),
        (0.0, "0.000us"),
    ],
)
def test_times(seconds: float, text: str) -> None:
    assert report.format_time(seconds) == text


def a_result(rows: int) -> Result:
    names = [symbols.Name("XLA", "elementwise", "-", f"{i} " + "long name of an operation " * 2) for i in range(rows)]
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
    for part in ("Profiler results", "Framework", "Kernel category", "Arch", "Operation", "# calls", "Runtime"):
        assert part in text
    assert [time_ in text for time_ in ("1.500us", "3.000us", "4.500us", "9.000us")] == [True] * 4


def test_long_tables_are_cut_but_add_up() -> None:
    result = a_result(30)
    table = report.result_table(result)
    assert len(table.rows) == 20
    assert table.rows[-1][3:5] == ("11 other operations", "11")
    assert table.footer[-1] == report.format_time(result.rows_total)
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
def test_results_name_tile_sizes_and_occupancy_where_it_is_known(
    backend: str, device: Device, occupancy: int | None
) -> None:
    plan = a_plan(backend, device, ((16, 8), (8, 8)))
    result = dataclasses.replace(a_result(1), plans={"forward": plan}, device=device)
    found = report.to_json(result)["tiles"]["forward"]
    assert found == {"query": (16, 8), "key_value": (8, 8), "tile_m": 128, "tile_n": 64, "occupancy": occupancy}
