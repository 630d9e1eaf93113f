"""What backends state of the performance arguments that they heed is what their kernels are given."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import pytest

from natten_jax import backends
from natten_jax.arrays.operands import Inputs, Operands, Output, Saved
from natten_jax.backends.base import Backend
from natten_jax.backends.pallas.blackwell import missing_in_jax
from natten_jax.backends.select import CHOICES, heeded, ignored, plan_with
from natten_jax.performance import ATTENTION_NAMES, PASSES, Pass, Performance
from natten_jax.plan.devices import CPU, Device
from natten_jax.plan.plan import Plan, Request
from natten_jax.problem import Problem, problem_of

#: A value of each argument that asks for something.
ASKED: dict[str, Any] = {
    "run_persistent_kernel": False,
    "kernel_schedule": "coop",
    "backward_kv_splits": (3,),
    "backward_use_xla_reduction": True,
    "backward_deterministic": True,
    "memory_usage_preference": "strict",
}
BACKENDS = {backend.family: backend for backend in backends.registered()}
#: Large enough for memory to be a matter; the tiles are of the common kernels.
PROBLEM = problem_of((1 << 19,), 64, heads=8, head_dim=128)
TILES = Performance(
    q_tile_shape=(64,), kv_tile_shape=(64,), backward_q_tile_shape=(64,), backward_kv_tile_shape=(64,)
)  # fmt: skip


def device_of(backend: Backend) -> Device:
    platform = backend.platform
    if platform is None or platform.name == "cpu":
        return CPU
    return Device(platform.name, platform.compute_capability, is_present=False)


def plan_for(backend: Backend, pass_: Pass, performance: Performance, problem: Problem = PROBLEM) -> Plan:
    return plan_with(backend, Request(problem, performance), device_of(backend), pass_)


def program(plan: Plan) -> str:
    """What a pass calls, and with which attributes."""
    backend, problem = backends.find(plan.backend, plan.backend.operator), plan.problem
    query = jax.ShapeDtypeStruct((1, *problem.query_layout, problem.heads, problem.head_dim), problem.dtype)
    per_query = jax.ShapeDtypeStruct(query.shape[:-1], "float32")
    operands = Operands(Inputs(query, query, query))  # type: ignore[arg-type]
    saved, cotangents = Saved(query, per_query, per_query), Output(query, per_query)  # type: ignore[arg-type]
    if plan.pass_ == "forward":
        return str(jax.make_jaxpr(lambda operands: backend.forward_saving(plan, operands))(operands))
    return str(jax.make_jaxpr(lambda *arrays: backend.backward(plan, *arrays))(operands, saved, cotangents))


def test_every_argument_but_tiles_has_an_entry() -> None:
    assert set(CHOICES) == {name for name in ATTENTION_NAMES if "tile" not in name} == set(ASKED)


def test_the_guide_says_the_same() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "performance.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)(?:=False)?` \| (?:forward|backward) \| (.*) \|$", guide, re.MULTILINE))
    assert {name: re.findall(r"`(\w+)`", families) for name, families in rows.items()} == {
        name: [family for family, backend in BACKENDS.items() if name in heeded(backend)] for name in CHOICES
    }


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("name_of_family", BACKENDS)
def test_what_is_heeded_changes_the_program(name_of_family: str, name: str) -> None:
    backend, pass_ = BACKENDS[name_of_family], CHOICES[name].pass_
    if pass_ not in backend.passes:
        assert name not in heeded(backend)
        return
    if name_of_family == "blackwell" and (reason := missing_in_jax()) is not None:
        pytest.skip(reason)
    tiles = TILES if backend.offers(PROBLEM, device_of(backend), pass_, ((64,), (64,))) else Performance()
    asked = dataclasses.replace(tiles, **{name: ASKED[name]})
    plan, plain = (plan_for(backend, pass_, performance) for performance in (asked, tiles))
    reasons = ignored(plan, asked)
    assert (name in heeded(backend)) == (name not in reasons)
    is_kept_anyway = name == "backward_deterministic" and name_of_family in ("blackwell", "cpu", "tpu", "flex")
    assert (program(plan) != program(plain)) == (name not in reasons and not is_kept_anyway)


@pytest.mark.parametrize("name_of_family", BACKENDS)
def test_reasons_name_the_backend_and_those_that_heed(name_of_family: str) -> None:
    asked = dataclasses.replace(TILES, **ASKED | {"backward_deterministic": False})
    for pass_ in PASSES:
        for name, reason in ignored(plan_for(BACKENDS[name_of_family], pass_, asked), asked).items():
            assert CHOICES[name].pass_ == pass_
            assert reason.startswith(f"{name_of_family}-fna ")
            for other in backends.registered():
                assert (f"{other.family}-fna" in reason.partition(" ")[2]) == (name in heeded(other))


def test_defaults_ask_for_nothing() -> None:
    for backend in backends.registered():
        for pass_ in backend.passes:
            assert ignored(plan_for(backend, pass_, Performance()), Performance()) == {}


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize(
    ("problem", "tiles", "more", "unused"),
    [
        (
            problem_of((56, 56), 7, heads=4, head_dim=32),
            ((8, 1), (4, 4)),
            {},
            {"backward_kv_splits", "backward_use_xla_reduction", "memory_usage_preference"},
        ),
        (problem_of((64,), 64, heads=4, head_dim=32, dtype="float32"), ((64,), (64,)), {}, {"memory_usage_preference"}),
        (problem_of((64,), 64, heads=4), ((64,), (64,)), {"backward_deterministic": True}, {"backward_kv_splits"}),
    ],
    ids=["small windows", "float32", "deterministic"],
)
def test_what_is_unused_in_a_plan_changes_nothing(
    name: str, problem: Problem, tiles: Any, more: dict[str, Any], unused: set[str]
) -> None:
    if CHOICES[name].pass_ == "forward" or name in more:
        return
    backend = BACKENDS["cutlass"]
    value: Any = (3,) * problem.rank if name == "backward_kv_splits" else ASKED[name]
    plain = Performance(**more).with_tiles("backward", tiles)
    asked = dataclasses.replace(plain, **{name: value})
    plan = plan_for(backend, "backward", asked, problem)
    assert set(ignored(plan, asked)) == unused & {name}
    if name in unused:
        assert program(plan) == program(plan_for(backend, "backward", plain, problem))
