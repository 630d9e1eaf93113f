"""Which kernels for GPUs add biases of keys themselves, and which get them as columns of wider heads."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.export
import pytest

import natten_jax
from natten_jax import backends
from natten_jax.performance import PASSES
from natten_jax.plan.devices import Device
from natten_jax.problem import Problem, problem_of
from tests.support.machine import Machine

_GPU = Device("cuda", (9, 0), is_present=False)
_CUTLASS = backends.find("cutlass-fna", "fna")


def _problem(layout: Any = (28, 28), kernel_size: Any = 7, **facts: Any) -> Problem:
    windows = {name: facts.pop(name) for name in ("stride", "dilation", "is_causal", "edges") if name in facts}
    changes = {name: facts.pop(name) for name in ("relative_bias", "own_origins", "own_extents") if name in facts}
    problem = problem_of(layout, kernel_size, **windows, **{"batch": 4, "heads": 4, "head_dim": 32, **facts})
    return dataclasses.replace(problem, key_bias=True, **changes)


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"head_dim": 29, "head_dim_v": 64},
        {"dtype": "float16", "heads_kv": 2},
        {"stride": 3, "dilation": 2, "is_causal": True},
        {"edges": "cut", "additional_kv": 5},
        {"layout": (7, 7), "operator": "fmha", "kernel_size": None},
        {"layout": (8, 16, 16), "kernel_size": (3, 5, 5)},
    ],
)
def test_kernels_for_small_windows_add_them(facts: dict[str, Any]) -> None:
    problem = _problem(**facts)
    for pass_ in PASSES:
        planned = _CUTLASS.widened(problem, _GPU, pass_)
        assert planned.key_bias
        assert planned.head_dim == -(-problem.head_dim // 8) * 8
        assert _CUTLASS.tile_pairs(planned, _GPU, pass_)


@pytest.mark.parametrize(
    "facts",
    [
        {"relative_bias": True},
        {"edges": "wrap"},
        {"own_origins": True},
        {"own_extents": True},
        {"head_dim": 128},
        {"dtype": "float32"},
        {"layout": (128, 128), "kernel_size": 63, "head_dim": 64},
    ],
)
def test_others_get_columns(facts: dict[str, Any]) -> None:
    problem = _problem(**facts)
    for pass_ in PASSES:
        planned = _CUTLASS.widened(problem, _GPU, pass_)
        assert not planned.key_bias
        assert planned.head_dim > problem.head_dim


def test_tiles_that_are_asked_for_decide() -> None:
    problem = _problem()
    for small, is_added in ((((4, 4), (1, 8)), True), (((8, 8), (8, 8)), False)):
        planned = _CUTLASS.widened(problem, _GPU, "forward", small)
        assert planned.key_bias == is_added
        assert _CUTLASS.offers(planned, _GPU, "forward", small)


@pytest.mark.parametrize("has_heads", [False, True])
def test_they_are_operands_as_they_are(machine: Machine, has_heads: bool) -> None:
    """Nothing is repeated for the heads, and nothing put beside the arrays."""
    machine.has(_GPU)

    def loss(query: jax.Array, key_bias: jax.Array) -> jax.Array:
        return natten_jax.na2d(query, query, query, 7, key_bias=key_bias).astype("float32").sum()

    shapes = (8, 28, 28, 4, 32), (8, *(4,) * has_heads, 28, 28)
    query, key_bias = (
        jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, ("bfloat16", "float32"), strict=True)
    )
    exported = jax.export.export(
        jax.jit(jax.grad(loss, (0, 1))), platforms=["cuda"], disabled_checks=natten_jax.EXPORT_CHECKS
    )(query, key_bias)
    text = str(exported.mlir_module())
    assert re.findall(r"custom_call @(natten_jax\w+)", text) == [
        "natten_jax_sm80_small_forward",
        "natten_jax_sm80_small_backward",
    ]
    assert "concatenate" not in text
    assert f"8x1x28x28x{4 if has_heads else 1}xf32" in text
    assert [each.shape for each in exported.out_avals] == list(shapes)
    if not has_heads:
        assert "(tensor<8x28x28xf32>) -> tensor<8x28x28x4" not in text
