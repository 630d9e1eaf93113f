"""Questions about TPUs on machines without one: configurations, and times that nobody has measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from natten_jax import simulator
from natten_jax.cost_model.simulation import TPU_CHIPS, chip_of
from natten_jax.plan.devices import Device
from natten_jax.problem import problem_of
from natten_jax.profiler.__main__ import main
from natten_jax.profiler.predict import STATIC

IMAGE = ["-i", "32", "32", "-w", "7", "-d", "64", "--dtype", "bf16", "--max-configs", "2"]


@pytest.mark.parametrize("chip", TPU_CHIPS)
def test_configurations_of_a_chip_that_is_not_there(chip: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*IMAGE, "--dry-run", "--device", chip]) == 0
    printed = capsys.readouterr().out
    assert f"Device: tpu ({TPU_CHIPS[chip].product})" in printed
    assert "compatible with backend tpu-fna" in printed and "compatible with backend flex-fna" in printed
    assert "not compatible with backend cpu-fna: it runs on platform cpu only" in printed
    # One sentence for each pass of the kernels, and none for plain JAX, which has no times.
    assert printed.count(STATIC) == 2


def test_a_static_time_says_that_it_is_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "simulated.json"
    arguments = [*IMAGE[:-2], "--simulate", "--device", "v5e", "--backprop", "--json", str(file)]
    assert main([*arguments, "--backend", "tpu-fna"]) == 0
    assert STATIC in capsys.readouterr().out
    found = json.loads(file.read_text())
    assert found["is_static"] and found["simulated_device"]["product"] == "TPU v5 lite"
    assert 0 < found["passes"]["forward"]["predicted_seconds"] < found["passes"]["backward"]["predicted_seconds"]
    # By default plain JAX runs there, which has no model.
    assert main(arguments) == 0
    assert STATIC not in capsys.readouterr().out
    assert not json.loads(file.read_text())["is_static"]


def test_the_static_model_is_the_slowest_of_products_softmax_and_memory() -> None:
    chip = TPU_CHIPS["v5e"]
    wide = problem_of((4096,), 512, heads=2, head_dim=256)
    found = simulator.simulate(wide, ((512,), (512,)))
    pairs = 2 * found.counts.executed_pairs
    assert chip.seconds(found) == pytest.approx(2 * pairs * 512 / 197e12)
    narrow = problem_of((4096,), 512, heads=2, head_dim=32)  # heads of 32 take as long as those of 128
    found = simulator.simulate(narrow, ((512,), (512,)))
    assert chip.seconds(found) == pytest.approx(max(2 * pairs * 256 / 197e12, pairs / 1024 * 2.5 / 1.5e9))
    few = simulator.simulate(problem_of((4096,), 2, head_dim=128), ((16,), (16,)))
    assert chip.seconds(few) == pytest.approx(few.tile_bytes / 0.82e12)
    in_float32 = problem_of((4096,), 512, heads=2, head_dim=256, dtype="float32")
    assert chip.seconds(simulator.simulate(in_float32, ((512,), (512,)))) == pytest.approx(6 * 2 * pairs * 512 / 197e12)


def test_chips_are_known_by_what_jax_calls_them() -> None:
    assert chip_of(Device("tpu", product="TPU v6 lite")) is TPU_CHIPS["v6e"]
    assert chip_of(Device("tpu")) is None and chip_of(Device("cuda", product="TPU v4")) is None


def test_a_name_for_tpus_shows_what_runs_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*IMAGE, "--backend", "tpu-fna"]) == 1
    captured = capsys.readouterr()
    assert "tpu-fna runs on platform tpu only, and this is cpu" in captured.err
    assert "A dry run with --device v4 shows:" in captured.out and "compatible with backend tpu-fna" in captured.out


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (["--device", "v5e"], "--device is for --dry-run and --simulate"),
        (["--device", "v5e", "--simulate", "--compute-capability", "9.0"], "exclude each other"),
        (["--device", "v9", "--dry-run"], "invalid choice: 'v9'"),
    ],
)
def test_flags_that_make_no_sense(flags: list[str], what: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main([*IMAGE, *flags])
    assert raised.value.code == 2 and what in capsys.readouterr().err
