"""The profiler: its command line, what it makes of traces, and its reports."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from natten_jax import flops, native
from natten_jax.devices import Device
from natten_jax.problem import Problem, attention_problem, neighborhood_problem
from natten_jax.profiler import Result, Row, capture, measure, parse, report, symbols, tables, workload
from natten_jax.profiler.__main__ import main
from natten_jax.profiler.capture import Event
from natten_jax.profiler.program import Instruction, Program

SEEDS_EXAMPLE = "-i 8 16 24 -d 128 -w 2 4 3"
FEW = "--warmup-steps 1 --iterations 3"


def profiler(arguments: str, platform: str | None = "cpu") -> subprocess.CompletedProcess[str]:
    """Run the command line program as a user would."""
    environment = {**os.environ, **({} if platform is None else {"JAX_PLATFORMS": platform})}
    command = [sys.executable, "-m", "natten_jax.profiler", *arguments.split()]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


def profile_to_json(arguments: str, folder: Path, platform: str | None = "cpu") -> tuple[str, dict[str, Any]]:
    path = folder / "result.json"
    finished = profiler(f"{arguments} --json {path}", platform)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout, json.loads(path.read_text())


def operations(result: dict[str, Any]) -> dict[str, int]:
    return {row["operation"]: row["calls"] for row in result["rows"]}


# The command line, as a user runs it.


def test_seeds_example(tmp_path: Path) -> None:
    output, result = profile_to_json(f"{SEEDS_EXAMPLE} {FEW}", tmp_path)
    assert "Profiler results" in output
    assert "Total" in output
    assert "na3d 8x16x24 k=2x4x3" in output
    assert "TFLOP/s" in output
    assert "\x1b" not in output
    assert max(map(len, output.splitlines())) <= 100

    assert set(result) == {
        "problem", "arguments", "versions", "device", "backends", "tiles",
        "rows", "iteration_times", "totals", "flops", "tflops",
    }  # fmt: skip
    assert result["problem"]["kernel_size"] == [2, 4, 3]
    assert result["arguments"]["dtype"] == "fp16"
    assert result["arguments"]["iterations"] == 3
    assert set(result["versions"]) == {"natten_jax", "jax", "jaxlib", "python"}
    assert result["device"]["platform"] == "cpu"
    assert len(result["iteration_times"]) == 3
    assert result["flops"] == {"forward": 4 * 128 * 3072 * 24, "total": 4 * 128 * 3072 * 24}
    totals = result["totals"]
    assert totals["median"] == statistics.median(result["iteration_times"])
    assert totals["min"] <= totals["median"] <= totals["max"]
    assert totals["rows"] == pytest.approx(sum(row["runtime"] for row in result["rows"]))
    for i, total in enumerate(result["iteration_times"]):
        assert total == pytest.approx(sum(row["runtimes"][i] for row in result["rows"]))
    assert result["tflops"] == pytest.approx(result["flops"]["total"] / totals["median"] / 1e12)


@pytest.mark.skipif(native.path() is None, reason="the native module is not built")
def test_backprop_with_additional_tokens_names_every_kernel(tmp_path: Path) -> None:
    arguments = f"-i 12 16 -n 2 --heads-kv 1 -w 5 4 -s 1 2 -c 1 0 --add-kv 6 --backprop --backend cpu-fna {FEW}"
    _, fused = profile_to_json(arguments, tmp_path)
    assert {name for name in operations(fused) if name.startswith(("Fna", "Fmha"))} == {"FnaForward", "FnaBackward"}
    assert fused["backends"] == {"forward": "cpu-fna", "backward": "cpu-fna"}
    output, result = profile_to_json(f"{arguments} --fmha-backend cpu-fmha", tmp_path)
    kernels = {name: calls for name, calls in operations(result).items() if name.startswith(("Fna", "Fmha"))}
    assert kernels == dict.fromkeys(("FnaForward", "FnaBackward", "FmhaForward", "FmhaBackward"), 1)
    assert [row["operation"] for row in result["rows"]][:4] == list(kernels)
    assert {row["framework"] for row in result["rows"]} == {"natten_jax-cpu", "XLA"}
    assert "cpu-fna, cpu-fmha for the additional KV" in output
    assert result["flops"]["total"] == 3.5 * result["flops"]["forward"]


def test_self_attention_takes_the_fast_path_with_the_named_backend(tmp_path: Path) -> None:
    output, result = profile_to_json(f"-i 8 8 --fmha-backend flex-fmha {FEW}", tmp_path)
    assert result["backends"] == {"forward": "flex-fmha"}
    assert {row["framework"] for row in result["rows"]} == {"XLA"}
    assert "Problem: self attention" in output


def test_xla_baseline(tmp_path: Path) -> None:
    arguments = f"-i 8 16 -n 4 --heads-kv 2 --dtype fp32 --backend xla --backprop {FEW}"
    output, result = profile_to_json(arguments, tmp_path)
    assert result["backends"] == {"forward": "xla", "backward": "xla"}
    assert {row["framework"] for row in result["rows"]} == {"XLA"}
    assert "gemm" in {row["category"] for row in result["rows"]}
    assert "Backend: xla, on" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("-i 64 --dtype e4m3", "dtype float8_e4m3fn; supported are"),
        ("-i 64 --backend cudnn", "the cudnn baseline needs an NVIDIA GPU"),
        ("-i 64 --backend xla --dtype fp16", "use --dtype bf16"),
    ],
)
def test_what_cannot_run_is_one_sentence(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workload, "default_device", lambda: Device("cpu"))
    assert main(arguments.split()) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("natten-jax-profiler: error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_what_cannot_run_fails_without_a_traceback() -> None:
    finished = profiler("-i 64 --q-tile 1000000 --kv-tile 1000000 --backend flex-fna -w 8")
    assert finished.returncode == 1
    assert "Traceback" not in finished.stderr
    assert "flex-fna does not offer q_tile_shape=(1000000,)" in finished.stderr


# Usage errors.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "required: -i/--input-size"),
        ("-i 2 2 2 2", "-i/--input-size takes 1 to 3 integers"),
        ("-i 0", "must be at least 1, got 0"),
        ("-i x", "'x' is not an integer"),
        ("-i 8 8 -w 4", "--window-size takes 2 value(s)"),
        ("-i 8 -s 1 1", "--stride takes 1 value(s)"),
        ("-i 8 -w 4 --dilation 1 2", "--dilation takes 1 value(s)"),
        ("-i 8 8 8 -c 1 0", "--causal takes 3 value(s), or one for all"),
        ("-i 8 -c maybe", "'maybe' is not a truth value"),
        ("-i 8 8 -w 4 9", "window size 4 9 exceeds input size 8 8"),
        ("-i 8 -w 4 -s 5", "stride 5 exceeds window size 4"),
        ("-i 8 -w 4 --dilation 3", "dilation 3 times window size 4 exceeds input size 8"),
        ("-i 8 -n 6 --heads-kv 4", "--heads 6 must be a multiple of --heads-kv 4"),
        ("-i 8 -w 4 --q-tile 8", "--q-tile was given without --kv-tile"),
        ("-i 8 -w 4 --kv-tile 8", "--kv-tile was given without --q-tile"),
        ("-i 8 -w 4 --backward-kv-tile 8", "--backward-kv-tile was given without --backward-q-tile"),
        ("-i 8 8 -w 4 4 --q-tile 8 --kv-tile 8 8", "--q-tile takes 2 value(s)"),
        ("-i 8 --backend nothing", "--backend nothing is unknown; choose one of"),
        ("-i 8 --backend cpu-fmha", "name it with --fmha-backend"),
        ("-i 8 --fmha-backend cpu-fna", "--fmha-backend cpu-fna is unknown; choose one of"),
        ("-i 8 --backend xformers", "baseline of PyTorch; JAX's are cudnn"),
        ("-i 8 --backend fav2", "use --backend cudnn"),
        ("-i 8 --backend xla --add-kv 4", "--add-kv does not go with --backend xla"),
        ("-i 8 --dtype fp64", "invalid choice: 'fp64'"),
        ("-i 8 --schedule fast", "invalid choice: 'fast'"),
        ("-i 8 --iterations 0", "must be at least 1, got 0"),
        ("-i 8 --warmup-steps -1", "must be at least 0, got -1"),
        ("-i 8 --json no/such/folder/out.json", "the folder 'no/such/folder' does not exist"),
        ("-i 8 --nonsense", "unrecognized arguments: --nonsense"),
    ],
)
def test_usage_errors(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments.split())
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("natten-jax-profiler: error: ")
    assert error.count("\n") == 1


def test_usage_error_of_the_program() -> None:
    finished = profiler("-i 8 -w 9")
    assert (finished.returncode, finished.stdout) == (2, "")
    assert "window size 9 exceeds input size 8" in finished.stderr


def test_help_has_groups_and_examples(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as exit_:
        main(["--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    for part in ("problem:", "backend and configuration:", "measurement and output:", "examples:", "-i 8 16 24"):
        assert part in text
    assert all(len(line) <= 100 for line in text.splitlines())


def test_defaults() -> None:
    options = parse(["-i", "8", "16"])
    assert (options.batch_size, options.heads, options.heads_kv, options.dim, options.dim_value) == (1, 1, 1, 64, 64)
    assert (options.window_size, options.stride, options.dilation) == ((8, 16), (1, 1), (1, 1))
    assert options.causal == (False, False)
    assert (options.dtype, options.backprop, options.add_kv, options.persistent) == ("fp16", False, 0, True)
    assert (options.warmup_steps, options.iterations) == (10, 20)
    assert parse(["-i", "8", "-n", "4", "-d", "32"]).heads_kv == 4
    assert parse(["-i", "8", "-n", "4", "-d", "32"]).dim_value == 32
    assert not parse(["-i", "8", "--no-persistent"]).persistent


@pytest.mark.parametrize(
    ("given", "expected"),
    [("true 0", (True, False)), ("False 1", (False, True)), ("1", (True, True)), ("False", (False, False))],
)
def test_causal(given: str, expected: tuple[bool, ...]) -> None:
    assert parse(["-i", "8", "8", "-c", *given.split()]).causal == expected


def test_baselines_ignore_windows_with_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "-i 8 8 -w 3 3 -s 2 2 -c 1 --backend xla"
    options = parse(arguments.split())
    assert (options.window_size, options.stride, options.causal) == ((8, 8), (1, 1), (False, False))
    error = capsys.readouterr().err
    assert "warning: --backend xla computes self attention only: --window-size, --stride, --causal ignored" in error


# Floating-point operations.


@pytest.mark.parametrize(
    ("layout", "window", "stride", "dilation", "causal"),
    [
        ((11,), (4,), (3,), (2,), (False,)),
        ((10,), (4,), (4,), (1,), (True,)),
        ((6, 7), (3, 7), (2, 5), (2, 1), (True, False)),
        ((4, 5, 6), (2, 4, 3), (1, 2, 3), (2, 1, 2), (False, True, False)),
    ],
)
@pytest.mark.parametrize("additional", [0, 3])
def test_flops_count_the_mask(
    layout: tuple[int, ...],
    window: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    causal: tuple[bool, ...],
    additional: int,
) -> None:
    query = jax.ShapeDtypeStruct((2, *layout, 6, 8), jnp.float32)
    key = query.update(shape=(2, *layout, 3, 8))
    value = query.update(shape=(2, *layout, 3, 24))
    extra: tuple[Any, ...] = (None, None)
    if additional:
        extra = key.update(shape=(2, additional, 3, 8)), key.update(shape=(2, additional, 3, 24))
    problem = neighborhood_problem(len(layout), query, key, value, window, stride, dilation, causal, None, *extra)
    pairs = int(oracle.neighborhood_mask(layout, window, stride, dilation, causal).sum()) + additional * math.prod(
        layout
    )
    assert flops.visible_pairs(problem) == pairs
    assert flops.flops(problem, "forward") == 2 * 2 * 6 * (8 + 24) * pairs
    assert flops.flops(problem, "backward") == 2.5 * flops.flops(problem, "forward")


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(5, 9), (9, 5)])
def test_flops_of_attention_between_sequences(queries: int, keys: int, is_causal: bool) -> None:
    query = jax.ShapeDtypeStruct((1, queries, 1, 8), jnp.float32)
    key = query.update(shape=(1, keys, 1, 8))
    problem = attention_problem(query, key, key, None, is_causal)
    assert flops.visible_pairs(problem) == oracle.attention_mask(queries, keys, is_causal).sum()


# Names of what is launched.

ATTENTION = Instruction(
    "custom-call", "jit(f)/ffi_call", "natten_jax_cuda_forward", "na2d 8x8 k=3x3 backend=hopper-fna"
)


@pytest.mark.parametrize(
    ("symbol", "expected"),
    [
        ("natten_jax_cpu_forward", ("natten_jax-cpu", "attention", "-", "FnaForward")),
        ("natten_jax_cpu_backward", ("natten_jax-cpu", "attention", "-", "FnaBackward")),
        ("void natten_jax::sm90::fna_forward<128, __half>(Args)", ("CUTLASS", "attention", "Sm90", "FnaForward")),
        ("_ZN10natten_jax4sm9013fmha_backwardILi64EEEvNS_4ArgsE", ("CUTLASS", "attention", "Sm90", "FmhaBackward")),
        ("void natten_jax::sm80::fna_backward<64>(Args)", ("CUTLASS", "attention", "Sm80", "FnaBackward")),
        ("void natten_jax::sm100::fmha_forward<64>(Args)", ("CUTLASS", "attention", "Sm100", "FmhaForward")),
        ("void natten_jax::fna_backward_delta<__half>(Args)", ("CUTLASS", "reduction", "-", "Reduction")),
        ("void natten_jax::fna_backward_convert<__half>(Args)", ("CUTLASS", "elementwise", "-", "Convert")),
        ("void natten_jax::token_permute<2>(Args)", ("CUTLASS", "token permute", "-", "TokenPermute")),
        ("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NNT",
         ("cuBLAS", "gemm", "-", "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NNT")),
        ("void cutlass::device_kernel<Gemm>(Params)", ("CUTLASS", "gemm", "-", "cutlass.device_kernel")),
        ("void cutlass::device_kernel<cutlass::fmha::Sm90FmhaFwdKernel<128>>(P)",
         ("CUTLASS", "attention", "Sm90", "FmhaForward")),
        ("void cutlass::device_kernel<cutlass::fmha::Sm100FmhaBwdKernel<128>>(P)",
         ("CUTLASS", "attention", "Sm100", "FmhaBackward")),
        ("void (anonymous namespace)::scan<float, 4>(int)", ("-", "-", "-", "scan")),
        ("triton_softmax_3", ("Triton", "softmax", "-", "triton_softmax_3")),
    ],
)  # fmt: skip
def test_names_of_symbols(symbol: str, expected: tuple[str, ...]) -> None:
    instruction = Instruction() if "natten_jax" not in symbol else ATTENTION
    assert symbols.name(symbol, instruction, "fmha") == symbols.Name(*expected)


def test_operator_is_what_the_instruction_or_else_the_problem_says() -> None:
    unmarked = Instruction("custom-call", "", "natten_jax_cpu_forward")
    marked = Instruction(
        "custom-call", "", "natten_jax_cpu_forward", "attention 8 k=8 forward backend=cpu-fmha|flex-fmha"
    )
    assert symbols.name(unmarked.target, unmarked, "fna").operation == "FnaForward"
    assert symbols.name(unmarked.target, unmarked, "fmha").operation == "FmhaForward"
    assert symbols.name(marked.target, marked, "fna").operation == "FmhaForward"
    # One Hopper kernel serves both operators.
    kernel = "void natten_jax::sm90::natten_jax_sm90_fna_forward<Traits>(ForwardParams)"
    assert symbols.name(kernel, marked, "fna").operation == "FmhaForward"
    assert symbols.name(kernel, ATTENTION, "fmha").operation == "FnaForward"


@pytest.mark.parametrize(
    ("symbol", "instruction", "expected"),
    [
        ("loop_multiply_fusion", Instruction("fusion", "jit(f)/scores/mul", fused=frozenset({"multiply"})),
         ("elementwise", "scores/mul")),
        ("loop_multiply_fusion_2", Instruction("fusion", "", fused=frozenset({"multiply"})),
         ("elementwise", "loop_multiply_fusion")),
        ("wrapped_transpose", Instruction("fusion", "jit(f)/jvp(na2d)/transpose", fused=frozenset({"transpose"})),
         ("copy", "transpose")),
        ("wrapped_transpose", Instruction("fusion", "query", fused=frozenset({"transpose"})),
         ("copy", "wrapped_transpose")),
        ("input_reduce_fusion",
         Instruction("fusion", "jit(f)/transpose(jvp())/reduce_sum", fused=frozenset({"reduce"})),
         ("reduction", "reduce_sum (backward)")),
        ("fusion_1", Instruction("fusion", "jit(f)/exp", fused=frozenset({"reduce", "exponential"})),
         ("softmax", "exp")),
        ("loop_convert_fusion", Instruction("fusion", "jit(f)/jit(_where)/x", fused=frozenset({"convert", "bitcast"})),
         ("elementwise", "Convert")),
        ("dot.3", Instruction("dot", "jit(f)/while/body/closed_call/bqhd,bkhd->bhqk/dot_general"),
         ("gemm", "dot_general")),
        ("while.1", Instruction("while", "jit(f)/while"), ("control flow", "while")),
        ("loop_add_fusion", Instruction(), ("elementwise", "loop_add_fusion")),
        ("input_reduce_fusion_4", Instruction(), ("reduction", "input_reduce_fusion")),
        ("wrapped_copy_1", Instruction(), ("copy", "wrapped_copy")),
    ],
)  # fmt: skip
def test_names_of_xla_instructions(symbol: str, instruction: Instruction, expected: tuple[str, str]) -> None:
    category, operation = expected
    assert symbols.name(symbol, instruction, "fna") == symbols.Name("XLA", category, "-", operation)


RECORDED = json.loads((Path(__file__).parent / "data" / "h200_symbols.json").read_text())


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda each: f"{each['program']}-{each['symbol'][:30]}")
def test_names_of_symbols_recorded_on_a_gpu(recorded: dict[str, Any]) -> None:
    instruction = Instruction(
        recorded["opcode"], recorded["scope"], recorded["target"], recorded["description"], frozenset(recorded["fused"])
    )
    named = symbols.name(recorded["symbol"], instruction, "fmha", recorded["scope"])
    assert list(dataclasses.astuple(named)) == recorded["named"]
    named = symbols.name(recorded["symbol"], Instruction(), "fmha", recorded["scope"])
    assert list(dataclasses.astuple(named)) == recorded["named_without_program"]


def test_recorded_symbols_are_of_every_framework() -> None:
    assert {each["named"][0] for each in RECORDED} == {"CUDA", "CUTLASS", "Pallas", "Triton", "XLA", "cuBLAS", "cuDNN"}


@pytest.mark.parametrize(
    ("target", "symbol", "expected"),
    [
        ("natten_jax_sm90_backward", "void natten_jax::natten_jax_delta_reduction<half>(uint4 const*)",
         ("CUTLASS", "reduction", "-", "Reduction")),
        ("natten_jax_sm90_backward", "void natten_jax::natten_jax_convert_gradient<half>(float4 const*)",
         ("CUTLASS", "elementwise", "-", "Convert")),
        ("natten_jax_sm90_backward", "void natten_jax::sm90::natten_jax_sm90_fna_backward<Traits<reduce, 64>>(P)",
         ("CUTLASS", "attention", "Sm90", "FnaBackward")),
        ("natten_jax_sm80_forward", "void f<cast>(P)", ("CUTLASS", "attention", "Sm80", "FnaForward")),
        ("__cudnn$fmhaScaleBiasSoftmaxBackward", "kernel0", ("cuDNN", "attention", "-", "FmhaBackward")),
        ("__cublas$gemm", "kernel0", ("cuBLAS", "gemm", "-", "kernel0")),
        ("mosaic_gpu_v2", "softmax_kernel", ("Pallas", "softmax", "-", "softmax_kernel")),
        ("somebody_elses", "void kernel0<float>(int)", ("-", "-", "-", "somebody_elses")),
        ("", "sm90_flash_fprop_wgmma_f16_knob_7_64x128x128", ("cuDNN", "attention", "Sm90", "FmhaForward")),
        ("", "natten_jax::(anonymous namespace)::natten_jax_convert_gradient(int)",
         ("CUTLASS", "elementwise", "-", "Convert")),
    ],
)  # fmt: skip
def test_the_program_names_a_launch_before_its_symbol_does(target: str, symbol: str, expected: tuple[str, ...]) -> None:
    instruction = Instruction("custom-call" if target else "", "", target)
    assert dataclasses.astuple(symbols.name(symbol, instruction, "fna")) == expected


def test_long_symbols_are_cut() -> None:
    assert symbols.clean("cudnn_generated_" + "x" * 45) == "x" * 45
    assert symbols.clean("void " + "x" * 46 + "<int>(float)") == "x" * 45 + "..."


# The compiled program's text.


def test_program_of_a_compiled_function() -> None:
    def function(x: jax.Array) -> jax.Array:
        with jax.named_scope("outer"):
            return jax.lax.fori_loop(0, 4, lambda i, y: jnp.sin(y) @ y, x)

    compiled = jax.jit(function).lower(jnp.ones((8, 8))).compile()
    program = Program.parse(compiled.as_text() or "")
    assert program.is_module("jit_function")
    assert program.is_module("jit_function(12)")
    assert not program.is_module("jit_functional")
    loops = [name for name, each in program.instructions.items() if each.opcode == "while"]
    assert len(loops) == 1
    assert program.is_container(loops[0])
    assert program.instruction(loops[0]).scope == "jit(function)/outer/while"
    assert any("sine" in each.fused or each.opcode == "sine" for each in program.instructions.values())
    assert program.instruction("no.such") == Instruction()


def test_program_of_custom_calls() -> None:
    text = """HloModule jit_f, is_scheduled=true

ENTRY %main.8 (q.1: f16[8]) -> f16[8] {
  %q.1 = f16[8]{0} parameter(0), metadata={op_name="q"}
  %call.0 = (f16[8]{0}, /*index=1*/f32[2]{0:T(256)S(1)}) custom-call(%q.1), \
custom_call_target="natten_jax_cpu_forward", frontend_attributes={natten_jax="na1d 8 k=3 forward backend=cpu-fna"}, \
metadata={op_name="jit(f)/a;jit(f)/b"}
  ROOT %get.1 = f16[8]{0} get-tuple-element(%call.0), index=0
}
"""
    instruction = Program.parse(text).instruction("call.0")
    description = "na1d 8 k=3 forward backend=cpu-fna"
    assert instruction == Instruction("custom-call", "jit(f)/a", "natten_jax_cpu_forward", description)


# Traces.


def test_overlapping_steps_share_the_time_and_containers_get_the_rest() -> None:
    program = Program("jit_f", {"while.1": Instruction("while"), "dot.1": Instruction("dot")})
    events = [
        Event("while.1", "while.1", "", 0.0, 100.0),
        Event("a", "a", "", 10.0, 20.0),
        Event("b", "b", "", 20.0, 30.0),
        Event("empty", "empty", "", 60.0, 0.0),
        Event("dot.1", "dot.1", "", 150.0, 50.0),
    ]
    durations = [event.duration for event in capture.exclusive(events, program)]
    assert durations == [60.0, 15.0, 25.0, 0.0, 50.0]
    assert sum(durations) == 150.0  # the time in which anything ran
    assert capture.exclusive([], program) == []


def intervals(names: str, runs: list[Any]) -> list[Any]:
    return [
        capture.Interval(Event(name, name, "", float(i), 1.0), run)
        for i, (name, run) in enumerate(zip(names, runs, strict=True))
    ]


def test_events_are_split_into_iterations() -> None:
    def named(parts: list[list[Any]] | None) -> list[str] | None:
        return None if parts is None else ["".join(interval.event.symbol for interval in part) for part in parts]

    assert named(capture.split(intervals("abcab", [7, 7, 7, 8, 8]), 2)) == ["abc", "ab"]
    assert capture.split(intervals("abab", [7, 7, 8, 8]), 3) is None
    assert named(capture.split(intervals("abba", [None] * 4), 2)) == ["ab", "ba"]
    assert named(capture.split(intervals("abba", [None] * 4)[::-1], 2)) == ["ab", "ba"]
    assert capture.split(intervals("aabb", [None] * 4), 2) is None
    assert capture.split(intervals("aba", [None] * 3), 2) is None


def compiled_attention() -> tuple[Callable[[], Any], Program]:
    query, key, value = (jax.random.normal(jax.random.key(i), (1, 768, 4, 64)) for i in range(3))
    compiled = jax.jit(jax.nn.dot_product_attention).lower(query, key, value).compile()
    return lambda: compiled(query, key, value), Program.parse(compiled.as_text() or "")


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="reads a trace of the CPU")
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
    totals = [sum(event.duration for event in events) / 1e9 for events in iterations]
    # Both clocks watch the same runs. Single ones may disagree: a busy machine may put the thread that notes the end
    # of a step, or this one, to sleep.
    ratio = statistics.median(total / wall for total, wall in zip(totals, walls[-9:], strict=True))
    assert 0.5 < ratio < 1.1


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="reads a trace of the CPU")
def test_a_trace_without_events_is_retried_then_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture.time, "sleep", lambda _: None)
    run, program = compiled_attention()
    calls = []

    def counted() -> Any:
        calls.append(1)
        return run()

    with pytest.raises(capture.CaptureError, match="recorded nothing"):
        capture.capture(counted, 2, Program("jit_other", {}), "cpu")
    assert len(calls) == 10
    assert capture.capture(counted, 1, program, "cpu")[0]


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
    assert tables.format_time(seconds) == text


def a_result(rows: int) -> Result:
    names = [symbols.Name("XLA", "elementwise", "-", f"{i} " + "long name of an operation " * 2) for i in range(rows)]
    listed = tuple(Row(name, 1, (1e-6 * (i + 1), 2e-6 * (i + 1)), ("x",)) for i, name in enumerate(names))
    totals = tuple(sum(row.runtimes[i] for row in listed) for i in range(2))
    problem, _ = workload.describe(parse(["-i", "8", "-w", "3"]))
    options, pair = parse(["-i", "8", "-w", "3"]), ((4,), (6,))
    chosen, tiles = {"forward": "cpu-fna"}, {"forward": pair}
    return Result(options, problem, chosen, tiles, Device("cpu"), listed, totals, {"forward": 1000})


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
    assert table.footer[-1] == tables.format_time(result.rows_total)
    assert len(report.to_json(result)["rows"]) == 30


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


def test_inputs_are_random() -> None:
    options = parse(["-i", "8", "8", "--backprop", "--add-kv", "3", "--dim-value", "32", "--dtype", "bf16"])
    cotangent, query, key, value, keys, values = workload.make_inputs(options)
    assert cotangent.shape == (1, 8, 8, 1, 32)
    assert (query.shape, value.shape) == ((1, 8, 8, 1, 64), (1, 8, 8, 1, 32))
    assert (keys.shape, values.shape) == ((1, 3, 1, 64), (1, 3, 1, 32))
    assert all(array.dtype == jnp.bfloat16 for array in (cotangent, query, key, value, keys, values))
    assert all(0.8 < float(np.std(np.asarray(array, np.float32))) < 1.2 for array in (cotangent, query, key, value))


def test_problem_of_self_attention() -> None:
    problem: Problem = workload.describe(parse(["-i", "8", "8"]))[0]
    assert problem.is_attention
    assert flops.visible_pairs(problem) == 64 * 64


@pytest.mark.gpu
def test_cudnn_baseline_on_a_gpu(tmp_path: Path) -> None:
    arguments = "-i 2048 -n 4 -d 128 --backend cudnn --backprop --iterations 5"
    output, result = profile_to_json(arguments, tmp_path, platform=None)
    assert "FmhaForward" in output
    assert operations(result)["FmhaForward"] == 1
    assert operations(result)["FmhaBackward"] == 1
    attention = [row for row in result["rows"] if row["category"] == "attention"]
    assert {row["framework"] for row in attention} == {"cuDNN"}
    assert all(row["arch"].startswith("Sm") for row in attention)
    assert result["device"]["platform"] == "cuda"
    assert 0 < result["tflops"] < 5000
