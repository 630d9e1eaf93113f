"""The operators under JAX's transformations."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import natten_jax
from natten_jax.execution import custom_vjp
from tests.support import oracle
from tests.support.families import BOUNDS, Family
from tests.support.meshes import assert_close as assert_near
from tests.support.meshes import mesh_of, put
from tests.support.problems import Case, both_passes, expected_of, quick, relative_error

CASE = Case((5, 6), (3, 4), stride=(2, 1), is_causal=(False, True), heads=2, additional=2, fused=True, head_dim=8)
CASE = dataclasses.replace(CASE, scales=(0.4, -0.7))  # one per head


def objective(case: Case, backend: str | None) -> Callable[[oracle.Tensors], jax.Array]:
    """Return a scalar function of the operands. Cotangents of output and logsumexp differ between elements."""
    function = case.operator(backend)

    def run(operands: oracle.Tensors) -> jax.Array:
        out, lse = function(operands)
        return jnp.sum(jnp.sin(out.astype(lse.dtype))) + jnp.sum(jnp.cos(lse))

    return run


#: Maximum relative difference between two equal computations that round at different points, by element type.
TOLERANCES = {"float32": 1e-5, "float64": 1e-5, "float16": 2e-3, "bfloat16": 1.5e-2}


def assert_close(found: Any, expected: Any, tolerance: float | None = None) -> None:
    """Raise if the arrays of two pytrees differ by more than a tolerance."""
    narrowest = min((a.dtype for a in jax.tree.leaves(expected)), key=lambda dtype: dtype.itemsize).name
    tolerance = TOLERANCES[narrowest] if tolerance is None else tolerance
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        one, other = np.asarray(one), np.asarray(other)
        assert relative_error(one, other.astype(np.float64), np.zeros(1)) <= tolerance


# Gradients ----------------------------------------------------------------------------------------------------------


def test_gradient_through_only_the_logsumexp(family: Family) -> None:
    case = Case((15,), (5,), stride=(2,), heads=2)
    operands = case.operands(family.dtype, 0)
    _, d_lse = case.cotangents(family.dtype, 0)
    function = case.operator(family.fna)
    gradients = quick(jax.grad(lambda o: jnp.vdot(function(o)[1], d_lse)))(operands)
    expected = expected_of(case, operands, (np.zeros(operands.query.shape), d_lse)).gradients
    assert relative_error(gradients.query, expected.query, np.zeros(1)) <= BOUNDS[family.dtype]
    assert relative_error(gradients.key, expected.key, np.zeros(1)) <= BOUNDS[family.dtype]
    assert not np.asarray(gradients.value).any()


def test_gradient_of_one_operand_only(family: Family) -> None:
    case = Case((9,), (3,), additional=2, fused=True)
    operands = case.operands(family.dtype, 0)
    whole = quick(jax.grad(objective(case, family.fna)))(operands)
    for name in (name for name, array in operands._asdict().items() if array is not None):
        alone = quick(jax.grad(lambda a, name=name: objective(case, family.fna)(operands._replace(**{name: a}))))
        assert_close(alone(getattr(operands, name)), getattr(whole, name))


# Batching -----------------------------------------------------------------------------------------------------------


def stacked(count: int, axes: oracle.Tensors, dtype: str) -> oracle.Tensors:
    """Return ``count`` samples of the operands of ``CASE``, stacked along the mapped axes ``axes``.

    Operands without a mapped axis are from the first sample.
    """
    samples = [CASE.operands(dtype, seed) for seed in range(count)]
    return oracle.Tensors(
        *(
            first if axis is None else jnp.stack([getattr(sample, name) for sample in samples], axis)
            for name, axis, first in zip(axes._fields, axes, samples[0], strict=True)
        )
    )


def taken(operands: oracle.Tensors, axes: oracle.Tensors, index: int) -> oracle.Tensors:
    return oracle.Tensors(
        *(a if axis is None else jnp.take(a, index, axis) for a, axis in zip(operands, axes, strict=True))
    )


AXES = {
    "all-first": oracle.Tensors(0, 0, 0, 0, 0, 0),
    "all-different": oracle.Tensors(1, 5, 3, 2, 4, 1),
    "query": oracle.Tensors(2, None, None, None, None),
    "additional-keys": oracle.Tensors(None, None, None, 3, None),
}


def test_nested_vmap(family: Family) -> None:
    inner, outer = AXES["all-first"], oracle.Tensors(0, None, 0, None, None)
    operands = stacked(2, inner, family.dtype)
    operands = operands._replace(query=jnp.stack([operands.query, -operands.query, 2 * operands.query]))
    operands = operands._replace(value=jnp.stack([operands.value, 3 * operands.value, -operands.value]))
    found = quick(jax.vmap(jax.vmap(CASE.operator(family.fna), (inner,)), (outer,)))(operands)
    function = quick(CASE.operator(family.fna))
    for i in range(3):
        for j in range(2):
            expected = function(taken(taken(operands, outer, i), inner, j))
            assert_close(jax.tree.map(lambda a, i=i, j=j: a[i, j], found), expected)


@pytest.mark.parametrize("name", ["all-different", "query", "additional-keys"])
def test_vmap_of_gradient_and_gradient_of_vmap(family: Family, name: str) -> None:
    axes = AXES[name]
    operands = stacked(2, axes, family.dtype)
    gradient = jax.grad(objective(CASE, family.fna))
    alone = [quick(gradient)(taken(operands, axes, i)) for i in range(2)]
    together = jax.tree.map(lambda *a: jnp.stack(a), *alone)
    assert_close(quick(jax.vmap(gradient, (axes,)))(operands), together)

    def total(operands: oracle.Tensors) -> jax.Array:
        return jax.vmap(objective(CASE, family.fna), (axes,))(operands).sum()

    found = quick(jax.grad(total))(operands)
    for field, axis, each in zip(axes._fields, axes, together, strict=True):
        if each is None:
            continue
        expected = each.sum(0) if axis is None else jnp.moveaxis(each, 0, axis)
        assert_close(getattr(found, field), expected)


# Control flow, rematerialisation, compilation -----------------------------------------------------------------------


def test_scan_and_its_gradient(family: Family) -> None:
    case = Case((12,), (5,), head_dim=8)
    operands = case.operands(family.dtype, 0)
    function = case.operator(family.fna)

    def layer(query: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        out, lse = function(operands._replace(query=query))
        return query + out, lse.sum()

    def loss(query: jax.Array, unroll: bool) -> jax.Array:
        query, totals = jax.lax.scan(layer, query, None, length=3, unroll=unroll)
        return jnp.sum(jnp.cos(query)) + totals.sum()

    found, expected = (
        quick(jax.value_and_grad(functools.partial(loss, unroll=unroll)))(operands.query) for unroll in (False, True)
    )
    assert_close(found, expected)


def test_checkpoint_does_not_change_the_gradient(family: Family) -> None:
    case = Case((12,), (5,), head_dim=8)
    operands = case.operands(family.dtype, 0)
    expected = quick(jax.grad(objective(case, family.fna)))(operands)
    policy = jax.checkpoint_policies.save_only_these_names(*natten_jax.CHECKPOINT_NAMES)
    for options in ({}, {"policy": policy}):
        remat = jax.checkpoint(objective(case, family.fna), **options)
        assert_close(quick(jax.grad(remat))(operands), expected)


@pytest.mark.parametrize(("keeps_results", "forwards"), [(True, 1), (False, 2)])
def test_saved_results_spare_the_second_forward_pass(family: Family, keeps_results: bool, forwards: int) -> None:
    case = Case((12,), (5,), head_dim=8)
    policy = jax.checkpoint_policies.save_only_these_names(*(natten_jax.CHECKPOINT_NAMES if keeps_results else ()))
    operands = case.operands(family.dtype, 0)

    # The layers run in a loop. Otherwise, the compiler might merge two equal forward passes of a layer.
    def layer(query: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jnp.sin(case.operator(family.fna)(operands._replace(query=query))[0]), None

    def layers(query: jax.Array) -> jax.Array:
        return jax.lax.scan(jax.checkpoint(layer, policy=policy), query, length=2)[0].sum()

    if family.target is None:
        jaxpr = str(jax.make_jaxpr(jax.grad(layers))(operands.query))
        assert len(re.findall(r"(?<!\()computation=Computation\(spec=plain forward", jaxpr)) == forwards
        assert jaxpr.count("computation=Derivative") == 1
        return
    program = quick(jax.value_and_grad(layers)).lower(operands.query).compile().as_text()
    kernels = re.findall(rf'custom_call_target="{family.target}_(forward|backward)"', program or "")
    assert sorted(kernels) == ["backward", *["forward"] * forwards]


def test_static_arguments_of_jit(family: Family) -> None:
    query, key, value, *_ = Case((9,), (3,)).operands(family.dtype, 0)
    names = ("kernel_size", "stride", "dilation", "is_causal", "scale", "backend", "return_lse")
    jitted = jax.jit(natten_jax.na1d, static_argnames=names)
    found = jitted(query, key, value, kernel_size=(3,), is_causal=True, backend=family.fna)
    assert_close(found, natten_jax.na1d(query, key, value, [3], is_causal=[True], backend=family.fna))


def test_equal_calls_are_traced_once(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls with equal arguments of different types are traced once. A call with another problem is traced again."""
    traced: list[Any] = []
    attend = custom_vjp._attend_on_device

    def recorded(*arguments: Any) -> Any:
        traced.append(arguments)
        return attend(*arguments)

    monkeypatch.setattr(custom_vjp, "_attend_on_device", recorded)
    jax.clear_caches()
    query, key, value, *_ = Case((6, 31), (3, 3)).operands(family.dtype, 0)
    spellings: tuple[Any, ...] = (3, (3, 3), [3, 3], np.int64(3), (np.int32(3), 3), np.array([3, 3]), jnp.array(3))
    for kernel_size in spellings:
        natten_jax.na2d(query, key, value, kernel_size, backend=family.fna)
    is_causal: Any = (False, np.False_)
    natten_jax.na2d(2 * query, key, value, 3, 1, 1, is_causal, query.shape[-1] ** -0.5, backend=family.fna)
    assert len(traced) == 1
    natten_jax.na2d(query, key, value, 3, is_causal=True, backend=family.fna)
    assert len(traced) == 2


# Several devices ----------------------------------------------------------------------------------------------------

SPLIT = Case((6, 7), (3, 4), stride=(2, 1), batch=4, heads=4, heads_kv=2, head_dim=8, additional=3, fused=True)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_shard_map_over_batch_and_heads(family: Family, kind: str) -> None:
    if family.needs_gpu:
        pytest.skip("the devices of this test are parts of the host")
    mesh = mesh_of(kind, batch=2, heads=2)
    grid, tokens = P("batch", None, None, "heads"), P("batch", None, "heads")
    specs = oracle.Tensors(grid, grid, grid, tokens, tokens)
    operands, cotangents = SPLIT.operands(family.dtype, 0), SPLIT.cotangents(family.dtype, 0)
    function = SPLIT.operator(family.fna)
    both = both_passes(function)
    expected = quick(both)(operands, cotangents)
    with jax.set_mesh(mesh):
        sharded = jax.shard_map(both, in_specs=(specs, (grid, grid)), out_specs=((grid, grid), specs))
        placed = jax.tree.map(lambda array, spec: put(array, mesh, *spec), operands, specs)
        found = quick(sharded)(placed, put(cotangents, mesh, *grid))
        assert_near(found, expected, atol=2e-5)
        if kind == "Explicit":
            assert_near(function(placed), expected[0], atol=2e-5)
            return
