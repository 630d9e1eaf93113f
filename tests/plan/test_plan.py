"""Plans: decided once, carried by the compiled program, and read back from its text."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import natten_jax
from natten_jax import backends
from natten_jax.arrays.operands import Inputs, Operands
from natten_jax.backends.select import resolve
from natten_jax.performance import PASSES, KernelSchedule, Pass, Performance
from natten_jax.plan.devices import CPU, Device
from natten_jax.plan.plan import BackendId, Plan, Request
from natten_jax.problem import Problem, problem_of
from natten_jax.profiler.program import Program
from natten_jax.windows import Axis

HOPPER = Device("cuda", (9, 0), is_present=False)

axes = st.builds(
    Axis,
    query_extent=st.integers(1, 2**40),
    kv_extent=st.integers(1, 2**40),
    kernel_size=st.integers(1, 2**40),
    stride=st.integers(1, 9),
    dilation=st.integers(1, 9),
    is_causal=st.booleans(),
)
shapes = st.none() | st.lists(st.integers(1, 512), min_size=1, max_size=3).map(tuple)
plans = st.builds(
    Plan,
    problem=st.builds(
        Problem,
        operator=st.sampled_from(["fna", "fmha"]),
        batch=st.integers(1, 9),
        axes=st.lists(axes, min_size=1, max_size=3).map(tuple),
        heads=st.integers(1, 64),
        heads_kv=st.integers(1, 64),
        head_dim=st.integers(1, 256),
        head_dim_v=st.integers(1, 256),
        dtype=st.sampled_from(["float16", "float32"]),
        scale=st.floats(allow_nan=False, allow_infinity=False),
        additional_kv=st.integers(0, 9),
    ),
    pass_=st.sampled_from(PASSES),
    backend=st.builds(BackendId, st.sampled_from(["cpu", "hopper"]), st.sampled_from(["fna", "fmha"])),
    platform=st.sampled_from(["cpu", "cuda", "other"]),
    performance=st.builds(
        Performance, q_tile_shape=shapes, backward_kv_splits=shapes, kernel_schedule=st.sampled_from([None, "pp"])
    ),
)


@given(plans)
def test_payload_says_everything(plan: Plan) -> None:
    text = plan.payload()
    assert "\n" not in text and json.loads(text)["description"] == plan.problem.describe()
    found = Plan.of_payload(text)
    assert found == plan and hash(found) == hash(plan)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"pass": "forward"}', '{"problem": [], "pass": 1}'])
def test_what_is_no_payload_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no plan of natten_jax"):
        Plan.of_payload(text)


def test_a_program_tells_what_runs(native_family: Any) -> None:
    array = jax.ShapeDtypeStruct((1, 12, 14, 2, 16), native_family.dtype)

    def both(array: jax.Array) -> Any:
        return jax.grad(lambda x: natten_jax.na2d(x, x, x, (3, 5), backend=native_family.fna).sum().astype("f4"))(array)

    program = Program.from_compiled(jax.jit(both).lower(array).compile())
    ran = {each.plan for each in program.instructions.values() if each.target.startswith(native_family.target)}
    problem = problem_of((12, 14), (3, 5), heads=2, head_dim=16, dtype=native_family.dtype)
    device = next(device for device in jax.devices())
    expected = CPU if device.platform == "cpu" else Device("cuda", (9, 0))
    assert {plan.pass_ for plan in ran if plan} == set(PASSES)
    if expected == CPU:
        assert ran == {resolve(Request(problem, backend=native_family.fna), CPU, pass_) for pass_ in PASSES}


@pytest.mark.parametrize("pass_", PASSES)
def test_requested_tiles_are_the_plan(pass_: Pass) -> None:
    problem = problem_of((64, 64), 9)
    pair = (8, 8), (8, 16)
    plan = resolve(Request(problem, Performance().with_tiles(pass_, pair), "hopper-fna"), HOPPER, pass_)
    assert plan.tiles == pair and plan.backend == BackendId("hopper", "fna")
    default = resolve(Request(problem, backend="hopper-fna"), HOPPER, pass_)
    assert default.kernel_schedule == (KernelSchedule.PING_PONG if pass_ == "forward" else None)
    assert default.tiles[0] and default.performance.tiles(pass_) == default.tiles


def test_schedules_are_of_those_who_have_them() -> None:
    asked = Performance(kernel_schedule="coop")
    problem = problem_of((64, 64), 9)
    assert resolve(Request(problem, asked, "hopper-fna"), HOPPER, "forward").kernel_schedule == "coop"
    assert resolve(Request(problem, asked, "cutlass-fna"), HOPPER, "forward").kernel_schedule is None


def test_an_empty_attention_kwargs_is_none() -> None:
    query = jnp.ones((1, 12, 2, 8))
    more = jnp.ones((1, 3, 2, 8))

    def calls(attention_kwargs: Any) -> int:
        operator = jax.jit(
            lambda q: natten_jax.na1d(
                q, q, q, 3, additional_keys=more, additional_values=more, attention_kwargs=attention_kwargs
            )
        )
        return str(operator.trace(query).jaxpr).count("natten_jax_pass[")

    assert calls({}) == calls(None) == 1
    assert calls({"q_tile_size": None}) == 2


@pytest.mark.parametrize("precision", [None, "highest", "tensorfloat32"])
def test_a_plan_has_the_precision_of_its_call(precision: str | None) -> None:
    request = Request(problem_of((16,), 4), backend="flex-fna", precision=precision)
    plan = resolve(request, CPU, "forward")
    assert plan.precision == precision
    assert Plan.of_payload(plan.payload()) == plan


@pytest.mark.parametrize("backend", ["flex-fna", "cutlass-fna"])
def test_backends_read_precision_from_the_plan_alone(backend: str) -> None:
    """Whatever JAX's option is where a pass is traced, which may be long after its call."""
    array: Any = jax.ShapeDtypeStruct((1, 64, 2, 64), jnp.float32)
    programs = []
    for around in (None, "tensorfloat32"):
        request = Request(problem_of((64,), 4, heads=2, head_dim=64, dtype="float32"), backend=backend)
        plan = resolve(request, Device("cuda", (9, 0), is_present=False), "forward")

        def run(operands: Operands, plan: Plan = plan) -> Any:
            return backends.of(plan.backend).forward(plan, operands)

        with jax.default_matmul_precision(around):
            programs.append(str(jax.make_jaxpr(run)(Operands(Inputs(array, array, array)))))
    assert programs[0] == programs[1]
