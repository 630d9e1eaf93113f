"""Basic runs of the profiler's command line."""

from __future__ import annotations

import os
import statistics
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import natten_jax
from natten_jax.cost_model import tiles
from natten_jax.plan.devices import Device
from natten_jax.problem import Problem
from natten_jax.profiler import measure, parse
from natten_jax.profiler import options as profiler_options
from tests.support.native_programs import needs_native
from tests.support.programs import run_command

from .conftest import Profiler

SEEDS_EXAMPLE = "-i 8 16 24 -d 128 -w 2 4 3"
FEW = "--warmup-steps 1 --iterations 3"


def operations(result: dict[str, Any]) -> dict[str, int]:
    return {row["operation"]: row["calls"] for row in result["rows"]}


def test_seeds_example(profiler: Profiler) -> None:
    output, _, result = profiler(f"{SEEDS_EXAMPLE} {FEW}")
    assert "Profiler results" in output
    assert "Total" in output
    assert "na3d 8x16x24 k=2x4x3" in output
    assert "TFLOP/s" in output

    assert set(result) == {
        "problem", "arguments", "platform", "versions", "device", "backends", "tiles",
        "rows", "iteration_times", "totals", "flops", "tflops",
    }  # fmt: skip
    assert [axis["kernel_size"] for axis in result["problem"]["axes"]] == [2, 4, 3]
    assert result["arguments"]["dtype"] == "fp16"
    assert result["arguments"]["iterations"] == 3
    assert set(result["versions"]) == {"natten_jax", "jax", "jaxlib", "python"}
    assert result["device"]["platform"] == result["platform"] == "cpu"
    assert len(result["iteration_times"]) == 3
    assert result["flops"] == {"forward": 4 * 128 * 3072 * 24, "total": 4 * 128 * 3072 * 24}
    totals = result["totals"]
    assert totals["median"] == statistics.median(result["iteration_times"])
    assert totals["min"] <= totals["median"] <= totals["max"]
    assert totals["rows"] == pytest.approx(sum(row["runtime"] for row in result["rows"]))
    for i, total in enumerate(result["iteration_times"]):
        assert total == pytest.approx(sum(row["runtimes"][i] for row in result["rows"]))
    assert result["tflops"] == pytest.approx(result["flops"]["total"] / totals["median"] / 1e12)


@needs_native
def test_backprop_with_additional_tokens_names_every_kernel(profiler: Profiler) -> None:
    arguments = f"-i 12 16 -n 2 --heads-kv 1 -w 5 4 -s 1 2 -c 1 0 --add-kv 6 --backprop --backend cpu-fna {FEW}"
    fused = profiler(arguments).saved
    assert {name for name in operations(fused) if name.startswith(("Fna", "Fmha"))} == {"FnaForward", "FnaBackward"}
    assert fused["backends"] == {"forward": "cpu-fna", "backward": "cpu-fna"}
    output, _, result = profiler(f"{arguments} --fmha-backend cpu-fmha")
    kernels = {name: calls for name, calls in operations(result).items() if name.startswith(("Fna", "Fmha"))}
    assert kernels == dict.fromkeys(("FnaForward", "FnaBackward", "FmhaForward", "FmhaBackward"), 1)
    assert [row["operation"] for row in result["rows"]][:4] == list(kernels)
    assert {row["framework"] for row in result["rows"]} == {"natten_jax-cpu", "XLA"}
    assert "cpu-fna, cpu-fmha for the additional KV" in output
    assert result["flops"]["total"] == 3.5 * result["flops"]["forward"]


def test_self_attention_takes_the_fast_path_with_the_named_backend(profiler: Profiler) -> None:
    output, _, result = profiler(f"-i 8 8 --fmha-backend flex-fmha {FEW}")
    assert result["backends"] == {"forward": "flex-fmha"}
    assert {row["framework"] for row in result["rows"]} == {"XLA"}
    assert "Problem: self attention" in output


def test_xla_baseline(profiler: Profiler) -> None:
    output, _, result = profiler(f"-i 8 16 -n 4 --heads-kv 2 --dtype fp32 --backend xla --backprop {FEW}")
    assert result["backends"] == {"forward": "xla", "backward": "xla"}
    assert {row["framework"] for row in result["rows"]} == {"XLA"}
    products = [row["operation"] for row in result["rows"] if row["category"] == "gemm"]
    assert products and all(name.startswith("dot_general") for name in products)
    assert all(row["category"] == "gemm" for row in result["rows"] if "dot_general" in row["operation"].split(" [")[0])
    assert "Backend: xla, on" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("-i 64 --backend cudnn", "the cudnn baseline needs an NVIDIA GPU"),
        ("-i 64 --backend xla --dtype fp16", "use --dtype bf16"),
        ("-i 64 -w 8 --dtype e4m3 --backprop", "arrays have no gradients"),
    ],
)
def test_unsupported_runs_raise_a_one_line_error(
    arguments: str, message: str, profiler: Profiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "default_device", lambda: Device("cpu"))
    output, error, _ = profiler(arguments, status=1)
    assert output == "" and error.count("\n") == 1
    assert error.startswith("natten-jax-profiler: error: ") and message in error


def test_unsupported_runs_fail_without_a_traceback() -> None:
    command = "-m natten_jax.profiler -i 64 --q-tile 1000000 --kv-tile 1000000 --backend flex-fna -w 8"
    finished = run_command(command.split(), {**os.environ, "JAX_PLATFORMS": "cpu"})
    assert finished.returncode == 1
    assert "Traceback" not in finished.stderr
    assert "flex-fna does not offer q_tile_shape=(1000000,)" in finished.stderr


def test_one_extent_for_all_dimensions_and_full_names_of_element_types(profiler: Profiler) -> None:
    arguments = f"-i 8 10 -w 3 -s 2 --dilation 2 --dtype bfloat16 --compile --backend flex-fna {FEW}"
    output, _, result = profiler(arguments)
    assert "k=3x3 s=2x2 d=2x2" in output
    assert "bf16, forward" in " ".join(output.split())
    assert (result["problem"]["dtype"], result["arguments"]["dtype"]) == ("bfloat16", "bf16")


def test_float64_is_computed_in_float64(profiler: Profiler) -> None:
    output, _, result = profiler(f"-i 16 -w 4 --dtype float64 --backprop {FEW}")
    assert "fp64, forward and backward" in " ".join(output.split())
    assert result["backends"] == {"forward": "flex-fna", "backward": "flex-fna"}
    options = parse(["-i", "16", "--dtype", "fp64", "--backend", "flex-fna", "-w", "4"])
    with profiler_options.arrays_of(options.problem):
        loaded = measure.compile_workload(options)
    assert {array.dtype.name for array in loaded.arguments} == {loaded.run().dtype.name} == {"float64"}


def test_every_flag_of_a_window_reaches_the_operator() -> None:
    flags = "-i 8 12 -d 8 -w 3 4 -s 2 1 --dilation 1 2 --causal 0 1 --edges wrap cut --dtype fp32"
    loaded = measure.compile_workload(parse(flags.split()))
    window: dict[str, Any] = {"kernel_size": (3, 4), "stride": (2, 1), "dilation": (1, 2), "is_causal": (False, True)}
    query, key, value = loaded.arguments
    expected = natten_jax.na2d(query, key, value, **window, edges=("wrap", "cut"))
    np.testing.assert_allclose(loaded.run(), expected, atol=2e-6)


def test_inputs_are_random() -> None:
    options = parse(["-i", "8", "8", "--backprop", "--add-kv", "3", "--dim-value", "32", "--dtype", "bf16"])
    cotangent, query, key, value, keys, values = measure.make_inputs(options)
    assert cotangent.shape == (1, 8, 8, 1, 32)
    assert (query.shape, value.shape) == ((1, 8, 8, 1, 64), (1, 8, 8, 1, 32))
    assert (keys.shape, values.shape) == ((1, 3, 1, 64), (1, 3, 1, 32))
    assert all(array.dtype == jnp.bfloat16 for array in (cotangent, query, key, value, keys, values))
    assert all(0.8 < float(np.std(np.asarray(array, np.float32))) < 1.2 for array in (cotangent, query, key, value))


def test_problem_of_self_attention() -> None:
    problem: Problem = parse(["-i", "8", "8"]).problem
    assert problem.is_attention
    assert tiles.visible_pairs(problem) == 64 * 64


@pytest.mark.gpu
def test_cudnn_baseline_on_a_gpu(profiler: Profiler) -> None:
    arguments = "-i 2048 -n 4 -d 128 --backend cudnn --backprop --iterations 5"
    output, _, result = profiler(arguments)
    assert "FmhaForward" in output
    assert operations(result)["FmhaForward"] == 1
    assert operations(result)["FmhaBackward"] == 1
    attention = [row for row in result["rows"] if row["category"] == "attention"]
    assert {row["framework"] for row in attention} == {"cuDNN"}
    assert all(row["arch"].startswith("Sm") for row in attention)
    assert result["device"]["platform"] == "cuda"
    assert 0 < result["tflops"] < 5000
