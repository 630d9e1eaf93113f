"""Key biases in GPU kernels: added by the kernels, or passed as columns (additional head dimensions of the keys)."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.export
import pytest

import natten_jax
from natten_jax import backends
from natten_jax.backends.select import ignored
from natten_jax.cost_model import small_windows
from natten_jax.performance import PASSES, KernelSchedule, Performance
from natten_jax.plan.devices import Device
from natten_jax.problem import Problem, problem_of
from tests.support.machine import Machine
from tests.support.plans import plans_of

_GPU = Device("cuda", (9, 0), is_present=False)
_CUTLASS = backends.find("cutlass-fna", "fna")
_HOPPER = backends.find("hopper-fna", "fna")


def _problem(layout: Any = (28, 28), kernel_size: Any = 7, **facts: Any) -> Problem:
    windows = {name: facts.pop(name) for name in ("stride", "dilation", "is_causal", "edges") if name in facts}
    changes = {name: facts.pop(name) for name in ("relative_bias", "own_origins", "own_extents") if name in facts}
    problem = problem_of(layout, kernel_size, **windows, **{"batch": 4, "heads": 4, "head_dim": 32, **facts})
    return dataclasses.replace(problem, key_bias=True, **changes)


_LARGE = {"layout": (128, 128), "kernel_size": 63, "head_dim": 64}


@pytest.mark.parametrize(
    ("facts", "has_small_kernels"),
    [
        ({}, True),
        ({"head_dim": 29, "head_dim_v": 64}, True),
        ({"dtype": "float16", "heads_kv": 2}, True),
        ({"stride": 3, "dilation": 2, "is_causal": True}, True),
        ({"edges": "cut", "additional_kv": 5}, True),
        ({"layout": (7, 7), "operator": "fmha", "kernel_size": None}, True),
        ({"layout": (8, 16, 16), "kernel_size": (3, 5, 5)}, True),
        # The following problems run on large-window kernels, which support key biases together with these features.
        # Columns could not be added to heads of 256, because these already have the largest supported size.
        (_LARGE, False),
        ({"head_dim": 128}, False),
        (_LARGE | {"dtype": "float16", "heads_kv": 2, "additional_kv": 5}, False),
        (_LARGE | {"edges": "wrap"}, False),
        (_LARGE | {"own_extents": True}, False),
        (_LARGE | {"head_dim": 256}, False),
    ],
)
def test_portable_kernels_add_them(facts: dict[str, Any], has_small_kernels: bool) -> None:
    problem = _problem(**facts)
    for pass_ in PASSES:
        assert _CUTLASS.rejection(problem, _GPU, pass_) is None
        planned = _CUTLASS.widened(problem, _GPU, pass_)
        assert planned.key_bias and planned.head_dim == -(-problem.head_dim // 8) * 8
        pair = _CUTLASS.tile_pairs(planned, _GPU, pass_)[0]
        if not has_small_kernels:
            assert planned == problem and not small_windows.are_selected(planned, pass_, pair)


@pytest.mark.parametrize(
    "facts",
    [
        {"relative_bias": True},
        {"edges": "wrap"},
        {"own_origins": True},
        {"own_extents": True},
        {"dtype": "float32"},
        _LARGE | {"dtype": "float32"},
    ],
)
def test_others_get_columns(facts: dict[str, Any]) -> None:
    """Key biases become columns for float32, with a relative bias, or if columns are faster.

    Columns are faster with wrapped edges, or with an origin or extent per batch entry. In these cases, only
    large-window kernels add key biases without columns. They have longer predicted times than small-window kernels with
    columns.
    """
    problem = _problem(**facts)
    for pass_ in PASSES:
        planned = _CUTLASS.widened(problem, _GPU, pass_)
        assert not planned.key_bias
        assert planned.head_dim > problem.head_dim


def test_heads_too_wide_for_required_columns_are_rejected() -> None:
    reason = _CUTLASS.rejection(_problem(dtype="float32", head_dim=256), _GPU, "forward")
    assert reason is not None
    assert "a key_bias adds 3 to head_dim, which must then be at most 256" in reason


@pytest.mark.parametrize(
    ("facts", "pair", "is_added"),
    [
        ({}, ((4, 4), (1, 8)), True),
        ({}, ((8, 8), (8, 8)), True),
        ({"own_extents": True}, ((4, 4), (1, 8)), False),
        ({"own_extents": True}, ((8, 8), (8, 8)), True),
        ({"dtype": "float32"}, ((8, 8), (8, 8)), False),
    ],
)
def test_requested_tiles_select_the_kernel(facts: dict[str, Any], pair: Any, is_added: bool) -> None:
    planned = _CUTLASS.widened(_problem(**facts), _GPU, "forward", pair)
    assert planned.key_bias == is_added
    assert _CUTLASS.offers(planned, _GPU, "forward", pair)


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"head_dim": 256, "heads": 64, "heads_kv": 1},
        {"edges": "wrap", "own_origins": True},
        {"own_extents": True, "additional_kv": 5},
        {"layout": (8, 64, 64), "kernel_size": (3, 35, 35), "head_dim": 128, "dtype": "float16"},
        {"layout": (4096,), "operator": "fmha", "kernel_size": None},
    ],
)
def test_kernels_for_hopper_add_them(facts: dict[str, Any]) -> None:
    """The Hopper kernels add key biases in all of these problems. The biases do not become columns."""
    problem = _problem(**facts)
    for pass_ in PASSES:
        assert _HOPPER.rejection(problem, _GPU, pass_) is None
        planned = _HOPPER.widened(problem, _GPU, pass_)
        assert planned == problem
        assert _HOPPER.tile_pairs(planned, _GPU, pass_) == _HOPPER.tile_pairs(
            dataclasses.replace(problem, key_bias=False), _GPU, pass_
        )


@pytest.mark.parametrize("schedule", list(KernelSchedule))
def test_kernels_for_hopper_take_turns(schedule: KernelSchedule) -> None:
    """With a key bias, kernels always use the ping-pong schedule. A request for the cooperative schedule is ignored."""
    asked = Performance(kernel_schedule=schedule)
    for has_bias in (False, True):
        problem = dataclasses.replace(_problem(), key_bias=has_bias)
        _, plans = plans_of("hopper-fna", problem, asked, _GPU)
        reasons = ignored(plans["forward"], asked)
        assert list(reasons) == ["kernel_schedule"] * (has_bias and schedule is KernelSchedule.COOPERATIVE)
        assert all("ping-pong schedule with a key_bias" in reason for reason in reasons.values())


@pytest.mark.parametrize(
    ("tokens", "kernel_size", "targets"),
    [
        (28, 7, ["natten_jax_sm80_small_forward", "natten_jax_sm80_small_backward"]),
        (96, 63, ["natten_jax_sm90_forward", "natten_jax_sm90_backward_statistics", "natten_jax_sm90_backward"]),
    ],
)
@pytest.mark.parametrize("has_heads", [False, True])
def test_they_are_operands_as_they_are(
    machine: Machine, has_heads: bool, tokens: int, kernel_size: int, targets: list[str]
) -> None:
    """The program does not repeat the bias for each head, and does not concatenate it with the keys."""
    machine.has(_GPU)

    def loss(query: jax.Array, key_bias: jax.Array) -> jax.Array:
        return natten_jax.na2d(query, query, query, kernel_size, key_bias=key_bias).astype("float32").sum()

    shapes = (8, tokens, tokens, 4, 32), (8, *(4,) * has_heads, tokens, tokens)
    query, key_bias = (
        jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, ("bfloat16", "float32"), strict=True)
    )
    exported = jax.export.export(
        jax.jit(jax.grad(loss, (0, 1))), platforms=["cuda"], disabled_checks=natten_jax.EXPORT_CHECKS
    )(query, key_bias)
    text = str(exported.mlir_module())
    assert re.findall(r"custom_call @(natten_jax\w+)", text) == targets
    assert "concatenate" not in text
    assert f"8x1x{tokens}x{tokens}x{4 if has_heads else 1}xf32" in text
    assert [each.shape for each in exported.out_avals] == list(shapes)
    if not has_heads:
        assert f"(tensor<8x{tokens}x{tokens}xf32>) -> tensor<8x{tokens}x{tokens}x4" not in text
