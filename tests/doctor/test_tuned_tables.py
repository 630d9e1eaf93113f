"""What the doctor says of configurations that were measured elsewhere."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from natten_jax.autotuning import tables as tuned
from natten_jax.autotuning.tables import TunedPass, TunedTable
from natten_jax.backends.select import resolve
from natten_jax.doctor import __main__ as doctor
from natten_jax.plan.devices import Device
from natten_jax.plan.plan import BackendId, Request
from natten_jax.problem import problem_of

GPU = Device("cuda", (9, 0), is_present=False, product="NVIDIA H100 80GB HBM3")
PROBLEM = problem_of((64, 64), (7, 7), heads=4, head_dim=64)
REQUEST = Request(PROBLEM)


def passed(**facts: Any) -> TunedPass:
    """The portable backend's plan of the forward pass."""
    plan = resolve(Request(PROBLEM, backend="cutlass-fna"), GPU, "forward")
    return dataclasses.replace(TunedPass(plan, 1e-3, 1.5e-3, False), **facts)


@pytest.fixture
def ship(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a table of the GPU into the package."""
    monkeypatch.delenv(tuned.VARIABLE, raising=False)

    def put(*passes: TunedPass) -> None:
        monkeypatch.setattr(tuned, "shipped_tables", lambda: {GPU.product: TunedTable(GPU.kind, passes)})

    return put


def test_a_hit_says_what_runs_and_how_much_faster(ship: Any) -> None:
    ship(passed())
    line = doctor.problem_line(REQUEST, GPU, "forward")
    q_tile, kv_tile = passed().plan.tiles
    assert line == (
        f"hit: cutlass-fna, query tile {q_tile}, key/value tile {kv_tile}; 1 ms, by default 1.5 ms (1.50 times as fast)"
    )
    ship(passed(seconds=1.5e-3, is_default=True))
    assert doctor.problem_line(REQUEST, GPU, "forward") == ("hit: nothing was clearly faster than the default (1.5 ms)")


@pytest.mark.parametrize(
    ("request_", "device", "reason"),
    [
        (REQUEST, Device("cuda", (9, 0)), r"no table is for cuda \(compute capability 9.0\); .* NVIDIA H100 80GB HBM3"),
        (REQUEST, dataclasses.replace(GPU, product="NVIDIA H200"), "no table is for NVIDIA H200; .* NVIDIA H100 80GB"),
        (Request(dataclasses.replace(PROBLEM, batch=2)), GPU, "has no such problem"),
        (Request(PROBLEM, backend="flex-fna"), GPU, "names a configuration of its own"),
    ],
)
def test_a_miss_says_why(request_: Request, device: Device, reason: str, ship: Any) -> None:
    ship(passed())
    line = doctor.problem_line(request_, device, "forward")
    assert re.match(f"miss: .*{reason}", line)


def test_what_a_build_cannot_run_and_what_is_switched_off_are_misses(
    ship: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = dataclasses.replace(passed().plan, backend=BackendId("gone", "fna"))
    ship(
        passed(plan=gone),
        passed(plan=dataclasses.replace(passed().plan, problem=dataclasses.replace(PROBLEM, batch=3))),
    )
    assert "this build cannot run what was found: there is no backend gone-fna" in doctor.problem_line(
        Request(gone.problem), GPU, "forward"
    )
    line = doctor.table_line(GPU)
    assert line.startswith("hit: the table of NVIDIA H100 80GB HBM3 has 2 problems; 2 of their 2 passes run otherwise")
    assert "; 1 are left alone" in line
    monkeypatch.setenv(tuned.VARIABLE, "0")
    for line in (doctor.table_line(GPU), doctor.problem_line(REQUEST, GPU, "forward")):
        assert line == "miss: NATTEN_JAX_TUNED=0 leaves tables alone"


def test_the_report_has_a_line_for_each_device_and_for_each_pass() -> None:
    report = list(doctor.report())
    (number,) = (number for number, line in enumerate(report) if line == "Tuned configurations on cpu")
    assert report[number + 1].startswith("  miss: no table is for cpu")
    options = doctor.arguments.parse(["-i", "12", "-w", "3", "--backprop", "--dry-run"])
    lines = [line for line in doctor.report_problem(options) if line.startswith("    tuned ")]
    assert len(lines) == 2
