"""The profiler's readable names, and the compiled programs that they are taken from."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from natten_jax.performance import Performance
from natten_jax.plan.plan import NAME_ATTRIBUTE, PLAN_ATTRIBUTE, BackendId, Plan, name_of
from natten_jax.problem import Operator, Problem
from natten_jax.profiler import symbols
from natten_jax.profiler.program import Instruction, Program
from natten_jax.windows import Axis
from tests.support.protobuf import field


def plan_of(operator: Operator) -> Plan:
    """A forward pass of either operator; one and the same kernel runs both."""
    axis = Axis(8, 8, 3 if operator == "fna" else 8, 1, 1, False)
    problem = Problem(operator, 1, (axis,), 1, 1, 64, 64, "float16", 0.125)
    return Plan(
        problem, "forward", BackendId("hopper", operator), "cuda", Performance(q_tile_shape=(8,), kv_tile_shape=(8,))
    )


ATTENTION = Instruction("custom-call", "jit(f)/ffi_call", "natten_jax_cuda_forward", plan_of("fna"))


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
    marked = Instruction("custom-call", "", "natten_jax_cpu_forward", plan_of("fmha"))
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
        ("ynn_fusion.4", Instruction("fusion", "", fused=frozenset({"dot"})), ("gemm", "dot_general")),
        ("ynn_fusion.2",
         Instruction("fusion", "jit(f)/vmap()/reduce_max", fused=frozenset({"dot", "exponential", "reduce"})),
         ("gemm", "dot_general + reduce_max")),
        ("fusion.7", Instruction("fusion", "jit(f)/transpose(jvp())/add", fused=frozenset({"add", "dot"})),
         ("gemm", "dot_general + add (backward)")),
        ("dot_fusion", Instruction(), ("gemm", "dot_fusion")),
        ("while.1", Instruction("while", "jit(f)/while"), ("control flow", "while")),
        ("loop_add_fusion", Instruction(), ("elementwise", "loop_add_fusion")),
        ("input_reduce_fusion_4", Instruction(), ("reduction", "input_reduce_fusion")),
        ("wrapped_copy_1", Instruction(), ("copy", "wrapped_copy")),
    ],
)  # fmt: skip
def test_names_of_xla_instructions(symbol: str, instruction: Instruction, expected: tuple[str, str]) -> None:
    category, operation = expected
    assert symbols.name(symbol, instruction, "fna") == symbols.Name("XLA", category, "-", operation)


RECORDED = json.loads((Path(__file__).parents[1] / "data" / "h200_symbols.json").read_text())


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda each: f"{each['program']}-{each['symbol'][:30]}")
def test_names_of_symbols_recorded_on_a_gpu(recorded: dict[str, Any]) -> None:
    plan = plan_of(recorded["operator"]) if recorded["operator"] else None
    instruction = Instruction(
        recorded["opcode"], recorded["scope"], recorded["target"], plan, frozenset(recorded["fused"])
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
        ("", "natten_jax::(anonymous namespace)::natten_jax_clear(float*)",
         ("CUTLASS", "elementwise", "-", "Elementwise")),
    ],
)  # fmt: skip
def test_the_program_names_a_launch_before_its_symbol_does(target: str, symbol: str, expected: tuple[str, ...]) -> None:
    instruction = Instruction("custom-call" if target else "", "", target)
    assert dataclasses.astuple(symbols.name(symbol, instruction, "fna")) == expected


def test_long_symbols_are_cut() -> None:
    assert symbols.clean("cudnn_generated_" + "x" * 45) == "x" * 45
    assert symbols.clean("void " + "x" * 46 + "<int>(float)") == "x" * 45 + "..."


# The compiled program.


def test_program_of_a_compiled_function() -> None:
    def function(x: jax.Array) -> jax.Array:
        with jax.named_scope("outer"):
            return jax.lax.fori_loop(0, 4, lambda i, y: jnp.sin(y) @ y, x)

    compiled = jax.jit(function).lower(jnp.ones((8, 8))).compile()
    program = Program.from_compiled(compiled)
    # The text of the program says the same.
    text = compiled.as_text() or ""
    printed = re.findall(r"^\s+(?:ROOT )?%?([\w.-]+) = .*?(?<![\w.-])([a-z][\w-]*)\(", text, re.MULTILINE)
    assert {name: each.opcode for name, each in program.instructions.items()} == dict(printed)
    scopes = {each.scope for each in program.instructions.values()}
    assert scopes - {""} == {scope.partition(";")[0] for scope in re.findall(r'op_name="([^"]*)"', text)}
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
    plan = plan_of("fna")

    def attribute(key: str, value: str) -> bytes:
        return field(1, field(1, key.encode()) + field(2, value.encode()))

    def call(name: bytes, attributes: bytes) -> bytes:
        scopes = field(7, field(2, b"jit(f)/a;jit(f)/b"))
        return field(1, name) + field(2, b"custom-call") + field(28, b"natten_jax_cpu_forward") + scopes + attributes

    name, payload = attribute(NAME_ATTRIBUTE, name_of(plan.payload())), attribute(PLAN_ATTRIBUTE, plan.payload())
    foreign = attribute(NAME_ATTRIBUTE, "0") + attribute(PLAN_ATTRIBUTE, "{}")
    calls = {b"call.0": field(68, name + payload), b"call.1": field(68, name), b"call.2": field(68, payload)}
    calls |= {b"call.3": field(68, foreign), b"call.4": b""}
    module = field(1, b"jit_f") + field(3, b"".join(field(2, call(*each)) for each in calls.items()))
    program = Program.from_proto(module)
    plans = [program.instruction(f"call.{i}").plan for i in range(5)]
    assert plans == [plan, plan, None, None, None]
    instruction = program.instruction("call.0")
    assert instruction == Instruction("custom-call", "jit(f)/a", "natten_jax_cpu_forward", plan)
