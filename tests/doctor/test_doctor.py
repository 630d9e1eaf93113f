"""The doctor: its reports on problems, its use of tables of tuned configurations, and runs without a device."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from natten_jax.autotuning import tables as tuned
from natten_jax.autotuning.tables import TunedPass, TunedTable
from natten_jax.backends.select import resolve
from natten_jax.doctor import __main__ as doctor
from natten_jax.doctor.__main__ import report_problem, scratch_bytes
from natten_jax.performance import Performance
from natten_jax.plan.devices import Device
from natten_jax.plan.plan import BackendId, Request
from natten_jax.problem import problem_of
from natten_jax.profiler.options import parse
from tests.support.plans import plans_of
from tests.support.programs import PACKAGE, output_of, run_command, run_python

FLAGS = ["-i", "12", "10", "-n", "4", "--heads-kv", "2", "-d", "64", "-w", "3", "5", "--backprop"]


def lines(*flags: str) -> list[str]:
    return list(report_problem(parse([*FLAGS, *flags, "--dry-run"])))


def test_names_tiles_and_reasons() -> None:
    report = lines()
    assert "na2d 12x10" in report[0]
    verdicts = {line.split()[0]: line for line in report if "-fna" in line}
    assert "key/value tile" in verdicts["cpu-fna"] and "0 bytes" in verdicts["cpu-fna"]
    assert "as XLA plans it" in verdicts["flex-fna"]
    assert "compute capability 9.0 only" in verdicts["hopper-fna"]


def test_the_doctor_answers_for_other_devices() -> None:
    report = lines("--compute-capability", "9.0")
    assert not any("no: it runs on NVIDIA GPUs of compute capability 9.0" in line for line in report)
    assert sum("hopper-fna" in line and "scratch memory" in line for line in report) == 2


@pytest.mark.parametrize("backend_family", ["hopper", "cutlass"])
@pytest.mark.parametrize("additional_kv", [0, 7])
def test_backward_scratch_is_one_float32_query_gradient_and_little_more(
    backend_family: str, additional_kv: int
) -> None:
    problem = problem_of(
        (12, 10), (3, 5), batch=2, heads=4, heads_kv=2, head_dim_v=128, scale=0.1, additional_kv=additional_kv
    )
    performance = Performance(backward_q_tile_shape=(8, 8), backward_kv_tile_shape=(8, 8))
    _, plans = plans_of(f"{backend_family}-fna", problem, performance, GPU)
    rows = 2 * 12 * 10 * 4
    held = scratch_bytes(plans["backward"])
    # Per query and head, the pass needs 64 float32 sums of query gradients and at most two other float32 numbers. The
    # remaining 64 bytes are a limit for scratch memory that does not depend on the number of queries.
    assert rows * 64 * 4 <= held <= rows * (64 + 2) * 4 + 64
    assert scratch_bytes(plans["forward"]) <= 64


def test_small_windows_keep_four_numbers_for_each_query() -> None:
    problem = problem_of((12, 10), (3, 5), batch=2, heads=4, heads_kv=2)
    _, plans = plans_of("cutlass-fna", problem, device=GPU)
    assert scratch_bytes(plans["backward"]) <= 2 * 12 * 10 * 4 * 4 * 4 + 64


def test_command_line() -> None:
    command = "-m", "natten_jax.doctor", "--problem", *FLAGS
    done = run_command(command, os.environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1:2] == ["  forward"]
    wrong = run_command([*command, "-w", "13"], os.environ)
    assert wrong.returncode == 2 and "window" in wrong.stderr


GPU = Device("cuda", (9, 0), is_present=False, product="NVIDIA H100 80GB HBM3")

PROBLEM = problem_of((64, 64), (7, 7), heads=4, head_dim=64)

REQUEST = Request(PROBLEM)


def passed(**facts: Any) -> TunedPass:
    """Return a ``TunedPass`` for the forward pass of ``PROBLEM`` on ``cutlass``. ``facts`` replaces some fields."""
    plan = resolve(Request(PROBLEM, backend="cutlass-fna"), GPU, "forward")
    return dataclasses.replace(TunedPass(plan, 1e-3, 1.5e-3, False), **facts)


@pytest.fixture
def ship(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that replaces the tables in the package by a table of tuned passes for ``GPU``."""
    monkeypatch.delenv(tuned.VARIABLE, raising=False)

    def put(*passes: TunedPass) -> None:
        monkeypatch.setattr(tuned, "shipped_tables", lambda: {GPU.product: TunedTable(GPU.kind, passes)})

    return put


def test_a_hit_prints_the_configuration_and_its_speedup(ship: Any) -> None:
    ship(passed())
    line = doctor.problem_line(REQUEST, GPU, "forward")
    q_tile, kv_tile = passed().plan.tiles
    assert line == (
        f"hit: cutlass-fna, query tile {q_tile}, key/value tile {kv_tile}; 1 ms, by default 1.5 ms (1.50 times as fast)"
    )
    ship(passed(seconds=1.5e-3, is_default=True))
    assert doctor.problem_line(REQUEST, GPU, "forward") == (
        "hit: no configuration was clearly faster than the default (1.5 ms)"
    )


@pytest.mark.parametrize(
    ("request_", "device", "reason"),
    [
        (
            REQUEST,
            Device("cuda", (9, 0)),
            r"the package has no table for cuda \(compute capability 9.0\), only for .*NVIDIA H100 80GB HBM3",
        ),
        (
            REQUEST,
            dataclasses.replace(GPU, product="NVIDIA H200"),
            "the package has no table for NVIDIA H200, only for .*NVIDIA H100 80GB",
        ),
        (Request(dataclasses.replace(PROBLEM, batch=2)), GPU, "does not contain this problem"),
        (Request(PROBLEM, backend="flex-fna"), GPU, "names a configuration"),
    ],
)
def test_a_miss_prints_the_reason(request_: Request, device: Device, reason: str, ship: Any) -> None:
    ship(passed())
    line = doctor.problem_line(request_, device, "forward")
    assert re.match(f"miss: .*{reason}", line)


def test_unsupported_configurations_and_disabled_tables_are_misses(ship: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = dataclasses.replace(passed().plan, backend=BackendId("gone", "fna"))
    other = dataclasses.replace(passed().plan, problem=dataclasses.replace(PROBLEM, batch=3))
    ship(passed(plan=gone), passed(plan=other))
    line = doctor.problem_line(Request(gone.problem), GPU, "forward")
    assert "this build cannot run the measured configuration: there is no backend gone-fna" in line
    line = doctor.table_line(GPU)
    assert line.startswith(
        "hit: the table of NVIDIA H100 80GB HBM3 has 2 problems; 2 of their 2 passes use another configuration"
    )
    assert "; 1 are not used" in line
    monkeypatch.setenv(tuned.VARIABLE, "0")
    for line in (doctor.table_line(GPU), doctor.problem_line(REQUEST, GPU, "forward")):
        assert line == "miss: NATTEN_JAX_TUNED=0 turns tables off"


def test_the_report_has_a_line_for_each_device_and_for_each_pass() -> None:
    report = list(doctor.report())
    (number,) = (number for number, line in enumerate(report) if line == "Tuned configurations on cpu")
    assert report[number + 1].startswith("  miss: the package has no table for cpu")
    options = doctor.parse(["-i", "12", "-w", "3", "--backprop", "--dry-run"])
    lines = [line for line in doctor.report_problem(options) if line.startswith("    tuned ")]
    assert len(lines) == 2


BENCH = PACKAGE.parent / "bench"

#: Platforms without a device. For ``"cuda"``, the tests hide all GPUs. The platform ``"nonsense"`` does not exist.
PLATFORMS = ["cuda", "nonsense"]

REASONS = {"cuda": "cuda", "nonsense": "'nonsense' is not in the list of known backends"}


def run_without(platform: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "JAX_PLATFORMS": platform, "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = str(PACKAGE.parent)
    return run_command(arguments, environment)


def sentences(text: str) -> str:
    assert "Traceback" not in text
    return " ".join(text.split())


@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_doctor_reports(platform: str) -> None:
    found = run_without(platform, "-m", "natten_jax.doctor")
    report = sentences(output_of(found))
    assert "none: JAX has no device: " in report and REASONS[platform] in report
    assert "cpu-fna runs float16" in report
    assert not found.stderr


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("flags", [[], ["--compute-capability", "9.0"]])
def test_the_doctor_answers_for_a_problem(platform: str, flags: list[str]) -> None:
    report = sentences(
        output_of(run_without(platform, "-m", "natten_jax.doctor", "--problem", "-i", "64", "-w", "8", *flags))
    )
    assert ("JAX has no device: " in report) == (not flags)
    assert "query tile" in report


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("flags", [[], ["--compute-capability", "9.0"]])
@pytest.mark.parametrize("mode", ["--dry-run", "--simulate"])
def test_the_profiler_answers(platform: str, mode: str, flags: list[str], tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    command = ["-m", "natten_jax.profiler", "-i", "64", "-w", "8", mode, *flags, "--json", str(path)]
    found = run_without(platform, *command)
    assert "tile" in output_of(found)
    said = sentences(found.stderr)
    if flags:
        assert not said
    else:
        assert said.startswith("natten-jax-profiler: warning: JAX has no device: ") and REASONS[platform] in said
    assert json.loads(path.read_text(encoding="utf-8"))["device"] is None


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("flags", [[], ["--optimize"], ["--compare", "xla"], ["--devices", "2", "-b", "2"]])
def test_checks_that_need_a_device_report_it(platform: str, flags: list[str]) -> None:
    found = run_without(platform, "-m", "natten_jax.profiler", "-i", "64", "-w", "8", *flags)
    assert found.returncode == 1
    said = sentences(found.stderr)
    assert said.startswith("natten-jax-profiler: error: JAX has no device: ") and REASONS[platform] in said
    assert len(found.stderr.splitlines()) == 1


def test_queries_and_traces_need_no_device() -> None:
    program = """
    import jax
    import natten_jax
    from natten_jax.plan.devices import CPU, Device, NoDeviceError, default_device, local_devices, lowering_targets

    query = jax.ShapeDtypeStruct((1, 64, 2, 64), "float16")
    assert natten_jax.get_configs_for_cutlass_fna(query, compute_capability="9.0")
    assert jax.eval_shape(lambda x: natten_jax.na1d(x, x, x, 8), query).shape == query.shape
    assert lowering_targets()["cuda"] == Device("cuda") and local_devices() == (CPU,)
    assert next(iter(lowering_targets())) == "cpu"
    for ask in (default_device, lambda: natten_jax.get_configs_for_cpu_fna(query)):
        try:
            ask()
        except NoDeviceError as error:
            assert str(error).startswith("JAX has no device: "), error
        else:
            raise AssertionError("there is no device")
    # Nothing of it is kept: what JAX is told later counts.
    jax.config.update("jax_platforms", "cpu")
    assert default_device() == CPU and natten_jax.get_configs_for_cpu_fna(query)
    print(natten_jax.na1d(*3 * (jax.numpy.ones((1, 8, 1, 8)),), 3).sum())
    """
    environment = {"JAX_PLATFORMS": "cuda", "CUDA_VISIBLE_DEVICES": ""}
    assert output_of(run_python(program, environment=environment)).split() == ["64.0"]
