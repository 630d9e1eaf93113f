"""Test the profiler on a GPU: command lines of the documentation, comparison with cuDNN, and search."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from natten_jax.plan.devices import default_device
from natten_jax.profiler import parse, profile
from natten_jax.profiler.__main__ import main
from tests.support.traces import rows_by_module

pytestmark = pytest.mark.gpu

FEW = "--warmup-steps 1 --iterations 3"
SEQUENCE = "-d 128 -i 4096 -w 256"
IMAGE = "-n 2 -d 128 -i 64 64 -w 16 16 --q-tile 16 8 --kv-tile 16 8"
VIDEO = "-n 2 -d 128 -i 8 16 16 -w 4 8 8 --q-tile 2 8 8 --kv-tile 2 8 8"


@pytest.fixture(autouse=True)
def _hopper() -> None:
    if default_device().compute_capability != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")


@pytest.mark.parametrize(
    "line",
    [
        *(SEQUENCE, f"{SEQUENCE} -s 32", f"{SEQUENCE} -s 256", IMAGE, f"{IMAGE} -s 16 16", VIDEO, f"{VIDEO} -s 4 8 8"),
        "-i 300 -n 2 -d 96 --fmha-backend hopper-fmha",
    ],
)
def test_attention_is_one_named_kernel(line: str) -> None:
    operator = "Fna" if "-w" in line else "Fmha"
    result = profile(parse(f"{line} {FEW}".split() + ["--backend", "hopper-fna"] * (operator == "Fna")))
    (kernel,) = (row for row in result.rows if row.name.category == "attention")
    assert (kernel.name.framework, kernel.name.arch) == ("CUTLASS", "Sm90")
    assert (kernel.name.operation, kernel.calls) == (f"{operator}Forward", 1) and 0 < kernel.runtime < 1e-3
    assert result.backends == {"forward": f"hopper-{operator.lower()}"}
    assert result.tiles["forward"][0]


def test_comparison_in_turns_keeps_the_programs_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    trace = tmp_path / "trace"
    line = f"{IMAGE} --compare cudnn --verbose --json {path} --trace-dir {trace} {FEW}"
    assert main(line.split()) == 0
    assert "Speedup over cudnn" in capsys.readouterr().out
    found = json.loads(path.read_text())
    assert {row["framework"] for row in found["rows"]} <= {"CUTLASS", "XLA", "CUDA"}
    assert {row["framework"] for row in found["baseline"]["rows"]} <= {"cuDNN", "CUDA"}
    modules = rows_by_module(trace, with_memory=True)
    for module, totals in (("jit_profiled_0", found["totals"]), ("jit_profiled_1", found["baseline"]["totals"])):
        total = sum(row.runtime for row in modules[module])
        assert 3 * totals["min"] <= total * (1 + 1e-6) <= 3 * totals["max"] * (1 + 2e-6)


def test_search_with_every_schedule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tuned.json"
    line = f"-n 2 -d 64 -i 16 16 16 -w 4 8 8 --dtype bf16 --backend hopper-fna --optimize --json {path} {FEW}"
    assert main(line.split()) == 0
    assert "kernel_schedule" in capsys.readouterr().out
    found = json.loads(path.read_text())
    trials = found["search"]["trials"]
    assert {trial.get("kernel_schedule") for trial in trials} >= {"pp", "coop", "non"}
    assert not [trial for trial in trials if trial["error"]]
    assert found["search"]["best_seconds"] <= found["search"]["default_seconds"]
