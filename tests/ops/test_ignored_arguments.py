"""A performance argument that changes nothing where a call runs is warned of, once for each line that asks."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import natten_jax
from natten_jax import IgnoredArgumentWarning, backends
from natten_jax.backends.select import heeded
from natten_jax.ops import calls
from natten_jax.plan.devices import Device
from tests.backends.test_heeded_arguments import ASKED
from tests.support.problems import OPERATORS

LAYOUT = (4, 5, 6)
EXPLICIT_DEFAULTS = {
    "backward_kv_splits": None,
    "backward_use_xla_reduction": False,
    "backward_deterministic": False,
    "memory_usage_preference": "default",
    "run_persistent_kernel": True,
    "kernel_schedule": None,
}


def arrays(rank: int) -> list[jax.Array]:
    return [jnp.ones((1, *LAYOUT[:rank], 2, 8))] * 3


def value_of(name: str, rank: int) -> Any:
    return (3,) * rank if name == "backward_kv_splits" else ASKED[name]


def warned(call: Callable[[], Any]) -> list[warnings.WarningMessage]:
    """What Python would show of these warnings in a process of its own."""
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
def test_what_the_backend_does_not_heed_is_warned_of(rank: int, name_of_family: str, name: str) -> None:
    known = {backend.family: heeded(backend) for backend in backends.registered()}
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
        assert message.startswith(f"{name}={shown!r} changes nothing on cpu: {name_of_family}-fna has no ")
        assert all((f"{family}-fna" in message) for family, names in known.items() if name in names)
        assert each.filename == __file__


@pytest.mark.parametrize("name", ASKED)
def test_attention_and_its_places_in_neighborhood_attention(name: str) -> None:
    query, key, value = arrays(1)
    asked = {name: value_of(name, 1)}
    is_heeded = name == "backward_deterministic"
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
        assert len(found) == (not is_heeded), place
        assert all(str(each.message).startswith(start) and "cpu-fmha has no" in str(each.message) for each in found)


def test_what_asks_for_nothing_is_silent() -> None:
    for more in ({}, EXPLICIT_DEFAULTS, {"q_tile_shape": (2, 2), "kv_tile_shape": (2, 2)}):
        for backend in (None, "cpu-fna", "flex-fna"):
            call = lambda: OPERATORS[2](*arrays(2), 3, backend=backend, **more)  # noqa: B023, E731
            assert warned(lambda: jax.eval_shape(call)) == []  # noqa: B023


def test_it_is_said_once_for_each_line() -> None:
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
def test_it_is_about_the_device_where_the_program_runs(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], name: str, is_silent: bool
) -> None:
    """The host's kernels heed none of these; the GPU's do, or are the ones that are named."""
    gpu = Device("cuda", capability, is_present=False)
    monkeypatch.setattr(calls, "device_of", lambda array: gpu)
    query = jnp.ones((1, 4096, 4, 64), jnp.bfloat16)
    asked: dict[str, Any] = {name: ASKED[name], "backward_q_tile_shape": (64,), "backward_kv_tile_shape": (64,)}
    found = warned(lambda: natten_jax.na1d(query, query, query, 512, **asked))
    assert (found == []) == is_silent
    for each in found:
        assert f"changes nothing on {gpu}: {'hopper' if capability == (9, 0) else 'cutlass'}-fna " in str(each.message)
