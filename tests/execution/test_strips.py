"""Wrapped dimensions on kernels without support for them, tested with the CPU kernels.

An additional pass computes attention to each strip. A strip contains the wrapped keys beyond one end of a dimension.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from natten_jax import na2d
from natten_jax.arrays.operands import Inputs, Operands
from natten_jax.backends import select
from natten_jax.execution import strips
from natten_jax.performance import PASSES, Pass, Performance
from natten_jax.plan.devices import Device
from natten_jax.plan.plan import Request
from natten_jax.problem import problem_of
from natten_jax.windows import Axis
from tests.support import oracle, strips_backend
from tests.support.cases import feature_cases, random_case
from tests.support.families import Family
from tests.support.machine import Machine
from tests.support.problems import Trial, check_all

FAMILY = Family.for_backend(strips_backend.BACKEND)


@pytest.fixture(autouse=True)
def _is_registered(machine: Machine) -> None:
    machine.knows(FAMILY.backend)


@pytest.mark.parametrize("has_biases", [False, True])
def test_results_equal_the_definition(has_biases: bool) -> None:
    cases = [case for case in feature_cases().values() if "wrap" in (case.edges or ())]
    cases += [random_case(seed, tokens=60) for seed in range(150)]
    trials = []
    for seed, case in enumerate(cases):
        if has_biases:
            kind, hidden = ("tokens", "heads")[seed % 2], (0.0, 0.4, 0.9)[seed % 3]
            case = dataclasses.replace(case, relative_bias=False, key_bias=kind, hidden=hidden)
        case = case.with_edges_of(FAMILY)
        if "wrap" in (case.edges or ()):
            trials.append(Trial(case, "float32", seed))
    assert len(trials) > 20
    check_all(trials, FAMILY)


@pytest.mark.parametrize("mode", ["ranks", "64 bits"])
def test_strips_are_traced_in_every_mode(mode: str) -> None:
    def loss(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return jnp.sum(na2d(query, key, value, (3, 5), edges="wrap", backend="strips-fna"))

    arrays = [jnp.ones((2, 6, 8, 2, 8), jnp.float32)] * 3
    with jax.numpy_rank_promotion("raise") if mode == "ranks" else jax.enable_x64(True):
        gradients = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*arrays).out_info
    assert [gradient.shape for gradient in gradients] == [array.shape for array in arrays]


@st.composite
def dimensions(draw: st.DrawFn) -> Axis:
    tokens, dilation = draw(st.integers(2, 40)), draw(st.integers(1, 4))
    kernel_size = draw(st.integers(2, tokens))
    stride = draw(st.sampled_from([s for s in range(1, kernel_size + 1) if tokens % s == 0]))
    return Axis(tokens * dilation, tokens * dilation, kernel_size, stride, dilation, edges="wrap")


@given(dimensions())
def test_strips_hold_exactly_the_keys_that_windows_see_beyond_the_ends(axis: Axis) -> None:
    extent = axis.kv_extent
    mask = oracle.line_mask(extent, axis.kernel_size, axis.stride, axis.dilation, False, "wrap")
    cut = oracle.line_mask(extent, axis.kernel_size, axis.stride, axis.dilation, False, "cut")
    behind = mask & ~cut
    seen = np.zeros_like(mask)
    for side in strips.sides_of(axis):
        keys = slice(side.first, side.first + side.keys)
        queries = slice(side.first_query, side.first_query + side.queries)
        first, end = axis.reach(np.arange(extent)[queries])
        at = side.origin + np.arange(side.keys)
        part = (first[:, None] <= at) & (at < end[:, None])
        part &= (np.arange(extent)[queries, None] - at) % axis.dilation == 0
        assert part[0].any() or part[-1].any()
        assert not seen[queries, keys][part].any()
        seen[queries, keys] |= part
    np.testing.assert_array_equal(seen, behind)


def test_keys_are_not_copied() -> None:
    """The program copies keys and values only for strips."""
    layout = 64, 96
    tokens = jax.ShapeDtypeStruct((1, *layout, 2, 16), "float32")

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return na2d(query, key, value, (5, 7), edges="wrap", backend=FAMILY.fna)

    text = jax.jit(attend).lower(tokens, tokens, tokens).as_text()
    longest = max(layout[0] + 6, layout[1] + 6)
    for operation in ("stablehlo.pad", "stablehlo.concatenate", "stablehlo.gather"):
        for line in (line for line in text.splitlines() if operation in line):
            shape = line.rsplit("tensor<", 1)[1].split("x")[:-1]
            assert np.prod([int(each) for each in shape]) <= 6 * longest * 2 * 16, line


def test_kernels_that_know_seams_need_no_strips() -> None:
    """Kernels that support wrapped dimensions need strips only if an array contains just a part of such a dimension."""
    device = Device("cuda", (9, 0), is_present=False)
    problem = problem_of((48, 64), 7, heads=2, head_dim=32, dtype="bfloat16", edges="wrap")

    def are_needed(name: str, pass_: Pass, first_extent: int = 48, **how: Any) -> bool:
        plan = select.resolve(Request(problem, Performance(**how), name), device, pass_)
        tokens = jnp.zeros((1, first_extent, 64, 2, 32), jnp.bfloat16)
        return strips.are_needed(plan, Operands(Inputs(tokens, tokens, tokens)))

    small: dict[str, Any] = {"q_tile_shape": (8, 2), "kv_tile_shape": (1, 8)}
    large: dict[str, Any] = {"q_tile_shape": (8, 8), "kv_tile_shape": (8, 8)}
    for pass_ in PASSES:
        assert not are_needed("hopper-fna", pass_)
        assert are_needed("hopper-fna", pass_, first_extent=24)
    assert are_needed("hopper-fna", "backward", backward_deterministic=True)
    assert not are_needed("cutlass-fna", "forward", **small)
    assert are_needed("cutlass-fna", "forward", **large)


def test_ragged_strides_raise_a_one_line_error() -> None:
    axis = Axis(10, 10, 5, 3, edges="wrap")
    problem = dataclasses.replace(problem_of((10,), 5), axes=(axis,))
    reason = FAMILY.backend.rejection(problem, Device("cpu"), "forward")
    assert reason == "it wraps windows if stride divides the 10 tokens of a dilation group, not with 3"


def test_kernel_results_are_not_updated_in_place_without_a_barrier() -> None:
    """An optimization barrier separates the custom call of a kernel from an update of a slice with its results.

    With one batch entry, the slice is contiguous. XLA for GPUs would fuse the custom call with the update, and fail.
    """
    tokens = jax.ShapeDtypeStruct((1, 8, 6, 2, 16), "float32")

    def loss(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return na2d(query, key, value, (5, 3), edges=("wrap", "shift"), backend=FAMILY.fna).sum()

    text = jax.jit(jax.grad(loss, (0, 1, 2))).lower(tokens, tokens, tokens).as_text()
    updates = 0
    for function in text.split("func.func")[1:]:
        made_by = dict(re.findall(r"(%\w+)(?::\d+)? = \"?([\w.]+)", function))
        updated = re.findall(r"stablehlo\.dynamic_update_slice (%\w+)", function)
        updates += len(updated)
        assert {made_by[name] for name in updated} <= {"stablehlo.optimization_barrier"}
    assert updates
