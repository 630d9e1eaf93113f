"""Readable names of kernels in the profiler, and the compiled programs from which the profiler derives them."""

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
    """Return the plan of an operator's forward pass on the Hopper backend, which has one kernel for both operators."""
    axis = Axis(8, 8, 3 if operator == "fna" else 8, 1, 1, False)
    problem = Problem(operator, 1, (axis,), 1, 1, 64, 64, "float16", 0.125)
    return Plan(
        problem, "forward", BackendId("hopper", operator), "cuda", Performance(q_tile_shape=(8,), kv_tile_shape=(8,))
    )


ATTENTION = Instruction("custom-call", "jit(f)/ffi_call", "natten_jax_cuda_forward", plan_of("fna"))


def test_operator_follows_from_the_instruction_or_the_problem() -> None:
    unmarked = Instruction("custom-call", "", "natten_jax_cpu_forward")
    marked = Instruction("custom-call", "", "natten_jax_cpu_forward", plan_of("fmha"))
    assert symbols.name(unmarked.target, unmarked, "fna").operation == "FnaForward"
    assert symbols.name(unmarked.target, unmarked, "fmha").operation == "FmhaForward"
    assert symbols.name(marked.target, marked, "fna").operation == "FmhaForward"
    # The Hopper kernel computes both operators, so only the plan shows the operator.
    kernel = "void natten_jax::sm90::natten_jax_sm90_fna_forward<Traits>(ForwardParams)"
    assert symbols.name(kernel, marked, "fna").operation == "FmhaForward"
    assert symbols.name(kernel, ATTENTION, "fmha").operation == "FnaForward"


DATA = Path(__file__).parents[1] / "data"
#: Kernel symbols that were recorded on a GPU, and their readable names.
RECORDED = json.loads((DATA / "h200_symbols.json").read_text())
#: More kernel symbols: one for each naming rule.
OTHERS = json.loads((DATA / "symbols.json").read_text())


@pytest.mark.parametrize("recorded", [*RECORDED, *OTHERS], ids=lambda each: f"{each['named'][1]}-{each['symbol'][:30]}")
def test_names_of_symbols(recorded: dict[str, Any]) -> None:
    plan = plan_of(recorded["operator"]) if recorded.get("operator") else None
    opcode, scope, target = (recorded.get(name, "") for name in ("opcode", "scope", "target"))
    instruction = Instruction(opcode, scope, target, plan, frozenset(recorded.get("fused", ())))
    named = symbols.name(recorded["symbol"], instruction, "fmha", scope)
    assert list(dataclasses.astuple(named)) == recorded["named"]
    if "named_without_program" in recorded:
        named = symbols.name(recorded["symbol"], Instruction(), "fmha", scope)
        assert list(dataclasses.astuple(named)) == recorded["named_without_program"]


def test_recorded_symbols_are_of_every_framework() -> None:
    assert {each["named"][0] for each in RECORDED} == {"CUDA", "CUTLASS", "Pallas", "Triton", "XLA", "cuBLAS", "cuDNN"}


def test_long_symbols_are_cut() -> None:
    assert symbols.clean("cudnn_generated_" + "x" * 45) == "x" * 45
    assert symbols.clean("void " + "x" * 46 + "<int>(float)") == "x" * 45 + "..."


# Instructions of the compiled program.


def test_program_of_a_compiled_function() -> None:
    def function(x: jax.Array) -> jax.Array:
        with jax.named_scope("outer"):
            return jax.lax.fori_loop(0, 4, lambda i, y: jnp.sin(y) @ y, x)

    compiled = jax.jit(function).lower(jnp.ones((8, 8))).compile()
    program = Program.from_compiled(compiled)
    # The text of the program shows the same names, opcodes and scopes.
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
