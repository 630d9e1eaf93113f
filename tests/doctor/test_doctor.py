"""``python -m natten_jax.doctor --problem``."""

from __future__ import annotations

import os

import pytest

from natten_jax.doctor.__main__ import report_problem, scratch_bytes
from natten_jax.performance import Performance
from natten_jax.plan.devices import Device
from natten_jax.problem import problem_of
from natten_jax.profiler import arguments
from tests.support.plans import plans_of
from tests.support.programs import run_command

FLAGS = ["-i", "12", "10", "-n", "4", "--heads-kv", "2", "-d", "64", "-w", "3", "5", "--backprop"]


def lines(*flags: str) -> list[str]:
    return list(report_problem(arguments.parse([*FLAGS, *flags, "--dry-run"])))


def test_names_tiles_and_reasons() -> None:
    report = lines()
    assert "na2d 12x10" in report[0]
    verdicts = {line.split()[0]: line for line in report if "-fna" in line}
    assert "key/value tile" in verdicts["cpu-fna"] and "0 bytes" in verdicts["cpu-fna"]
    assert "as XLA plans it" in verdicts["flex-fna"]
    assert "compute capability 9.0 only" in verdicts["hopper-fna"]


def test_other_devices_may_be_asked_about() -> None:
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
    device = Device("cuda", (9, 0), is_present=False)
    _, plans = plans_of(f"{backend_family}-fna", problem, performance, device)
    rows = 2 * 12 * 10 * 4
    held = scratch_bytes(plans["backward"])
    # Beside it at most two numbers a row, and results of no additional tokens.
    assert rows * 64 * 4 <= held <= rows * (64 + 2) * 4 + 64
    assert scratch_bytes(plans["forward"]) <= 64


def test_small_windows_keep_four_numbers_for_each_query() -> None:
    problem = problem_of((12, 10), (3, 5), batch=2, heads=4, heads_kv=2)
    _, plans = plans_of("cutlass-fna", problem, device=Device("cuda", (9, 0), is_present=False))
    assert scratch_bytes(plans["backward"]) <= 2 * 12 * 10 * 4 * 4 * 4 + 64


def test_command_line() -> None:
    command = "-m", "natten_jax.doctor", "--problem", *FLAGS
    done = run_command(command, os.environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1:2] == ["  forward"]
    wrong = run_command([*command, "-w", "13"], os.environ)
    assert wrong.returncode == 2 and "window" in wrong.stderr
