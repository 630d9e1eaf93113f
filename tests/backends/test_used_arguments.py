"""Performance arguments that change a program, and warnings about arguments without an effect."""

from __future__ import annotations

import dataclasses
import inspect
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import natten_jax
from natten_jax import IgnoredArgumentWarning, backends
from natten_jax.arrays.operands import Inputs, Operands, Output, Saved
from natten_jax.backends.base import Backend
from natten_jax.backends.pallas.blackwell import missing_in_jax
from natten_jax.backends.select import CHOICES, ignored, plan_with, used_arguments_of
from natten_jax.ops import calls
from natten_jax.performance import ATTENTION_NAMES, PASSES, Pass, Performance
from natten_jax.plan.devices import CPU, Device
from natten_jax.plan.plan import Plan, Request
from natten_jax.problem import Problem, problem_of
from tests.support.problems import OPERATORS

#: For each performance argument, a value that differs from the default.
ASKED: dict[str, Any] = {
    "run_persistent_kernel": False,
    "kernel_schedule": "coop",
    "backward_kv_splits": (3,),
    "backward_use_xla_reduction": True,
    "backward_deterministic": True,
    "memory_usage_preference": "strict",
}

BACKENDS = {backend.family: backend for backend in backends.registered()}

#: A problem so large that options for memory usage have an effect. With TILES, it runs on the most common kernels.
PROBLEM = problem_of((1 << 19,), 64, heads=8, head_dim=128)

TILES = Performance((64,), (64,), (64,), (64,))


def device_of(backend: Backend) -> Device:
    platform = backend.capabilities.platform
    if platform is None or platform.name == "cpu":
        return CPU
    return Device(platform.name, platform.compute_capability, is_present=False)


def plan_for(backend: Backend, pass_: Pass, performance: Performance, problem: Problem = PROBLEM) -> Plan:
    return plan_with(backend, Request(problem, performance), device_of(backend), pass_)


def program(plan: Plan) -> str:
    """Return the jaxpr of a pass as text. It contains the calls of kernels with their attributes."""
    backend, problem = backends.find(plan.backend, plan.backend.operator), plan.problem
    query = jax.ShapeDtypeStruct((1, *problem.query_layout, problem.heads, problem.head_dim), problem.dtype)
    per_query = jax.ShapeDtypeStruct(query.shape[:-1], "float32")
    operands = Operands(Inputs(query, query, query))  # type: ignore[arg-type]
    saved, cotangents = Saved(query, per_query, per_query), Output(query, per_query)  # type: ignore[arg-type]
    if plan.pass_ == "forward":
        return str(jax.make_jaxpr(lambda operands: backend.forward(plan, operands, saves=True))(operands))
    return str(jax.make_jaxpr(lambda *arrays: backend.backward(plan, *arrays))(operands, saved, cotangents))


def test_every_argument_except_tiles_has_an_entry() -> None:
    assert set(CHOICES) == {name for name in ATTENTION_NAMES if "tile" not in name} == set(ASKED)


def test_the_guide_lists_the_same_arguments() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "performance.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)(?:=False)?` \| (?:forward|backward) \| (.*) \|$", guide, re.MULTILINE))
    assert {name: re.findall(r"`(\w+)`", families) for name, families in rows.items()} == {
        name: [family for family, backend in BACKENDS.items() if name in used_arguments_of(backend)] for name in CHOICES
    }


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("name_of_family", BACKENDS)
def test_used_arguments_change_the_program(name_of_family: str, name: str) -> None:
    backend, pass_ = BACKENDS[name_of_family], CHOICES[name].pass_
    if name_of_family == "blackwell" and (reason := missing_in_jax()) is not None:
        pytest.skip(reason)
    tiles = TILES if backend.offers(PROBLEM, device_of(backend), pass_, ((64,), (64,))) else Performance()
    asked = dataclasses.replace(tiles, **{name: ASKED[name]})
    plan, plain = (plan_for(backend, pass_, performance) for performance in (asked, tiles))
    reasons = ignored(plan, asked)
    assert (name in used_arguments_of(backend)) == (name not in reasons)
    is_kept_anyway = name == "backward_deterministic" and name_of_family in ("blackwell", "cpu", "tpu", "flex")
    assert (program(plan) != program(plain)) == (name not in reasons and not is_kept_anyway)


@pytest.mark.parametrize("name_of_family", BACKENDS)
def test_reasons_name_the_backend_and_backends_that_use_the_argument(name_of_family: str) -> None:
    asked = dataclasses.replace(TILES, **ASKED | {"backward_deterministic": False})
    for pass_ in PASSES:
        for name, reason in ignored(plan_for(BACKENDS[name_of_family], pass_, asked), asked).items():
            assert CHOICES[name].pass_ == pass_
            assert reason.startswith(f"{name_of_family}-fna ")
            for other in backends.registered():
                assert (f"{other.family}-fna" in reason.partition(" ")[2]) == (name in used_arguments_of(other))


def test_defaults_do_not_warn() -> None:
    for backend in backends.registered():
        for pass_ in PASSES:
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
def test_arguments_unused_by_a_plan_do_not_change_the_program(
    name: str, problem: Problem, tiles: Any, more: dict[str, Any], unused: set[str]
) -> None:
    if CHOICES[name].pass_ == "forward" or name in more:
        return
    backend = BACKENDS["cutlass"]
    plain = Performance(**more).with_tiles("backward", tiles)
    asked = dataclasses.replace(plain, **{name: value_of(name, problem.rank)})
    plan = plan_for(backend, "backward", asked, problem)
    assert set(ignored(plan, asked)) == unused & {name}
    if name in unused:
        assert program(plan) == program(plan_for(backend, "backward", plain, problem))


LAYOUT = (4, 5, 6)

EXPLICIT_DEFAULTS = {name: getattr(Performance(), name) for name in ASKED}


def arrays(rank: int) -> list[jax.Array]:
    return [jnp.ones((1, *LAYOUT[:rank], 2, 8))] * 3


def value_of(name: str, rank: int) -> Any:
    return (3,) * rank if name == "backward_kv_splits" else ASKED[name]


def warned(call: Callable[[], Any]) -> list[warnings.WarningMessage]:
    """Return the warnings about ignored arguments that a call raises, at most one per line of code."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        call()
    return [each for each in found if issubclass(each.category, IgnoredArgumentWarning)]


def line_of(function: Callable[..., Any], text: str) -> int:
    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, line in enumerate(lines) if text in line)


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("name_of_family", ["cpu", "flex"])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_arguments_that_the_backend_ignores_raise_a_warning(rank: int, name_of_family: str, name: str) -> None:
    known = {backend.family: used_arguments_of(backend) for backend in backends.registered()}
    value = value_of(name, rank)
    found = warned(
        lambda: jax.eval_shape(
            lambda: OPERATORS[rank](*arrays(rank), 3, backend=f"{name_of_family}-fna", **{name: value})
        )
    )
    assert len(found) == (name not in known[name_of_family])
    shown = value[0] if isinstance(value, tuple) and rank == 1 else value
    for each in found:
        message = str(each.message)
        assert message.startswith(f"{name}={shown!r} has no effect on cpu: {name_of_family}-fna has no ")
        assert all((f"{family}-fna" in message) for family, names in known.items() if name in names)
        assert each.filename == __file__


@pytest.mark.parametrize("name", ASKED)
def test_attention_and_its_sub_calls_in_neighborhood_attention(name: str) -> None:
    query, key, value = arrays(1)
    asked = {name: value_of(name, 1)}
    is_used = name == "backward_deterministic"
    calls: dict[str, tuple[Callable[[], Any], str]] = {
        "itself": (lambda: natten_jax.attention(query, key, value, **asked), f"{name}="),
        "whole layout": (lambda: natten_jax.na1d(query, key, value, LAYOUT[0], **asked), f"{name}="),
        "whole layout, attention_kwargs": (
            lambda: natten_jax.na1d(query, key, value, LAYOUT[0], attention_kwargs=asked),
            f"attention_kwargs: {name}=",
        ),
        "additional tokens": (
            lambda: natten_jax.na1d(query, key, value, 3, 1, 1, False, None, key, value, asked),
            f"attention_kwargs: {name}=",
        ),
    }
    for place, (call, start) in calls.items():
        found = warned(lambda call=call: jax.eval_shape(call))  # type: ignore[misc]
        assert len(found) == (not is_used), place
        assert all(str(each.message).startswith(start) and "cpu-fmha has no" in str(each.message) for each in found)


def test_default_values_and_tiles_do_not_warn() -> None:
    for more in ({}, EXPLICIT_DEFAULTS, {"q_tile_shape": (2, 2), "kv_tile_shape": (2, 2)}):
        for backend in (None, "cpu-fna", "flex-fna"):
            call = lambda: OPERATORS[2](*arrays(2), 3, backend=backend, **more)  # noqa: B023, E731
            assert warned(lambda: jax.eval_shape(call)) == []  # noqa: B023


def test_it_warns_once_per_line() -> None:
    query, key, value = arrays(1)

    def twice() -> None:
        for _ in range(3):
            natten_jax.na1d(query, key, value, 3, kernel_schedule="pp")  # the first
        natten_jax.na1d(query, key, value, 3, kernel_schedule="pp")  # the second

    found = warned(twice)
    assert [each.lineno for each in found] == [line_of(twice, "the first"), line_of(twice, "the second")]
    assert {each.filename for each in found} == {__file__}


def asks(query: jax.Array) -> jax.Array:
    return natten_jax.na1d(query, query, query, 3, kernel_schedule="pp").sum()  # asks


@pytest.mark.parametrize(
    "run",
    [
        jax.jit(asks),
        jax.grad(asks),
        jax.jit(jax.value_and_grad(asks)),
        jax.checkpoint(asks),
        lambda x: jax.vmap(asks)(x[None]),
        lambda x: jax.lax.scan(lambda carry, each: (carry, asks(each)), 0, x[None]),
        lambda x: jax.lax.cond(True, asks, lambda x: x.sum(), x),
    ],
    ids=["jit", "grad", "jit of grad", "checkpoint", "vmap", "scan", "cond"],
)
def test_the_line_is_found_through_transformations(run: Callable[[jax.Array], Any]) -> None:
    found = warned(lambda: run(arrays(1)[0]))
    assert {(each.filename, each.lineno) for each in found} == {(__file__, line_of(asks, "# asks"))}
    assert len(found) == 1


def test_flax_modules_name_the_line_that_calls_them() -> None:
    flax_layers = pytest.importorskip("tests.support.flax_layers")
    inputs = jnp.ones((1, *LAYOUT[:2], 16))
    module = flax_layers.LINEN[2](num_heads=2, kernel_size=3, backward_use_xla_reduction=True)

    def run() -> None:
        module.init_with_output(jax.random.key(0), inputs)  # runs it

    found = warned(run)
    assert [(each.filename, each.lineno) for each in found] == [(__file__, line_of(run, "runs it"))]
    plain = flax_layers.LINEN[2](num_heads=2, kernel_size=3)
    assert warned(lambda: plain.init_with_output(jax.random.key(0), inputs)) == []


@pytest.mark.parametrize(
    ("capability", "name", "is_silent"),
    [
        ((9, 0), "kernel_schedule", True),
        ((9, 0), "run_persistent_kernel", True),
        ((9, 0), "memory_usage_preference", False),
        ((8, 0), "memory_usage_preference", True),
        ((8, 0), "kernel_schedule", False),
    ],
)
def test_the_warning_is_for_the_device_that_runs_the_program(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], name: str, is_silent: bool
) -> None:
    """The warning is about the backend that runs the program, which depends on the device of the arrays."""
    gpu = Device("cuda", capability, is_present=False)
    monkeypatch.setattr(calls, "device_of", lambda array: gpu)
    query = jnp.ones((1, 4096, 4, 64), jnp.bfloat16)
    asked: dict[str, Any] = {name: ASKED[name], "backward_q_tile_shape": (64,), "backward_kv_tile_shape": (64,)}
    found = warned(lambda: natten_jax.na1d(query, query, query, 512, **asked))
    assert (found == []) == is_silent
    for each in found:
        assert f"has no effect on {gpu}: {'hopper' if capability == (9, 0) else 'cutlass'}-fna " in str(each.message)
