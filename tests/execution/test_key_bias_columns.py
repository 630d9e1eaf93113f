"""Operands in the form that GPU kernels require: padded heads, and key biases as columns (additional head dimensions).

The tests run the CPU kernels with such operands.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from natten_jax import backends, na1d, na2d
from natten_jax.arrays.boxes import is_real
from natten_jax.backends.cpu import CpuBackend
from natten_jax.backends.select import resolve
from natten_jax.plan.devices import default_device
from natten_jax.plan.plan import Request
from natten_jax.problem import problem_of
from tests.ops.test_added_logits import CASES as ADDED
from tests.ops.test_added_logits import check
from tests.support import columns_backend
from tests.support.cases import random_case
from tests.support.families import Family, family_named
from tests.support.machine import Machine
from tests.support.meshes import assert_close, mesh_of, put
from tests.support.problems import Case, Trial, check_all

FAMILY = Family.for_backend(columns_backend.BACKEND)

CASES = {
    "scales": Case((30,), (7,), key_bias="heads", heads=4, heads_kv=2, scales=(0.3, -0.5, 0.0, 8e-4), hidden=0.2),
    "no scale": Case((30,), (7,), key_bias="heads", heads=4, heads_kv=2, scale=0.0, hidden=0.2, batch=2),
    "small scale": Case((4, 9), (3, 5), key_bias="tokens", scale=8e-4, hidden=0.1),
    "large scale": Case((24,), (5,), key_bias="tokens", scale=3.0),
    "wraps, hidden": Case((2, 17), (2, 4), edges=("wrap", "shift"), key_bias="heads", hidden=0.8),
    "box": Case((9, 12), (3, 5), dilation=(2, 1), batch=2, box=(4, 5), origins=((2, 3), (5, 7)), key_bias="heads"),
    "finer grid": Case((5, 6), (3, 4), upsample=(2, 1), key_bias="heads", sinks=True, heads=2, heads_kv=1),
    "lengths and scales": Case(
        (40,),
        queries=25,
        key_bias="tokens",
        heads=2,
        batch=2,
        extents=((40,), (11,)),
        query_lengths=(7, 25),
        scales=(0.3, 0.0),
    ),
    "extents and sinks": Case(
        (9, 8), (3, 5), key_bias="heads", hidden=0.4, heads=2, batch=2, extents=((4, 8), (9, 5)), sinks=True
    ),
    "lengths and sinks": Case(
        (27,),
        queries=19,
        key_bias="tokens",
        hidden=0.8,
        heads=2,
        heads_kv=1,
        batch=2,
        extents=((7,), (4,)),
        query_lengths=(13, 6),
        scale=-0.35,
        sinks=True,
    ),
}


@pytest.fixture(autouse=True)
def _is_registered(machine: Machine) -> None:
    machine.knows(FAMILY.backend)


@pytest.mark.parametrize("name", ["extents and sinks", "lengths and sinks"])
def test_kernels_know_padding_by_its_logsumexp(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward pass gets a logsumexp of -inf for padding queries, which may contain any numbers.

    Otherwise, padding queries would contribute to the gradients of sinks.
    """
    call_backward = columns_backend.ColumnsBackend.call_backward
    given: list[tuple[np.ndarray, np.ndarray]] = []

    def backward(self: Any, plan: Any, operands: Any, saved: Any, *arguments: Any) -> Any:
        real = is_real(operands.layouts, saved.logsumexp.shape[1:-1], for_queries=True)
        jax.debug.callback(lambda *arrays: given.append(arrays), real, saved.logsumexp)
        return call_backward(self, plan, operands, saved, *arguments)

    monkeypatch.setattr(columns_backend.ColumnsBackend, "call_backward", backward)
    check_all([Trial(CASES[name], "float32")], FAMILY)
    jax.effects_barrier()
    assert given
    for real, logsumexp in given:
        assert not np.all(real)
        assert np.isneginf(logsumexp[~real]).all()
        assert np.isfinite(logsumexp[real]).all()


@pytest.mark.parametrize("dtype", FAMILY.dtypes)
def test_results_equal_the_definition(dtype: str) -> None:
    check_all([Trial(case, dtype) for case in CASES.values()], FAMILY)


def test_random_problems() -> None:
    rng = np.random.default_rng(0)
    trials = []
    for seed in range(100, 160):
        case = dataclasses.replace(
            random_case(seed, tokens=60),
            key_bias=str(rng.choice(["tokens", "heads"])),
            hidden=float(rng.choice([0.0, 0.3, 0.7])),
            sinks=bool(rng.random() < 0.3),
        )
        if case.head_dim + 3 * (case.heads // case.heads_kv) <= columns_backend.LARGEST_HEAD_DIM:
            trials.append(Trial(case.with_edges_of(FAMILY), "float32", seed))
    assert len(trials) > 45
    check_all(trials, FAMILY)


def test_plans_hold_the_head_width_of_the_kernels() -> None:
    problem = dataclasses.replace(problem_of((23,), 5, heads=4, heads_kv=2, head_dim=32), key_bias=True)
    plan = resolve(Request(problem, backend=FAMILY.fna), default_device(), "forward")
    assert (plan.problem.head_dim, plan.problem.head_dim_v, plan.problem.scale) == (40, 32, 32**-0.5)


def test_heads_too_wide_for_columns_are_rejected() -> None:
    array = jnp.ones((1, 9, 2, 64))
    with pytest.raises(ValueError, match=r"a key_bias adds 3 to head_dim, which must then be at most 64"):
        jax.eval_shape(lambda: na1d(array, array, array, 3, key_bias=jnp.zeros((1, 9)), backend=FAMILY.fna))
    assert na1d(array, array, array, 3, backend=FAMILY.fna).shape == array.shape


@pytest.mark.parametrize("dtype", FAMILY.dtypes)
@pytest.mark.parametrize("mask_value", [-jnp.inf, -1e9, float(np.finfo(np.float32).min)])
def test_a_masked_key_is_as_if_it_were_not_there(dtype: str, mask_value: float) -> None:
    """Every bias that masks out keys results in the same gradients as ``-inf``, even with logits around 100."""
    query, key, value = jnp.asarray(jax.random.normal(jax.random.key(0), (3, 1, 12, 2, 16)) * 3, dtype)

    def gradients(backend: str, hidden: float) -> Any:
        bias = jnp.zeros((1, 12)).at[:, 8:].set(hidden)

        def loss(key: Any, value: Any) -> Any:
            out = na1d(query, key, value, 12, key_bias=bias, scale=1.0, backend=backend)
            return jnp.sum(out.astype(jnp.float32) ** 2), out

        return jax.grad(loss, (0, 1), has_aux=True)(key, value)

    found, expected = gradients(FAMILY.fna, mask_value), gradients("flex-fna", -jnp.inf)
    tolerance = 1e-4 if dtype == "float32" else 3e-2
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
        np.testing.assert_allclose(one, other, atol=tolerance * np.abs(other).max())
    for gradient in found[0]:
        np.testing.assert_array_equal(np.asarray(gradient[:, 8:], np.float32), 0)


@pytest.mark.parametrize("dtype", FAMILY.dtypes)
@pytest.mark.parametrize("name", sorted(ADDED.keys() - {"relative"}))
def test_one_rule_for_all_numbers(name: str, dtype: str) -> None:
    check(FAMILY, ADDED[name], dtype)


@pytest.mark.parametrize("dtype", FAMILY.dtypes)
def test_low_relative_biases_and_sinks_do_not_hide_keys(dtype: str) -> None:
    """Kernels treat queries with a very low logsumexp as queries without keys.

    Low biases and sinks must not result in such a logsumexp.
    """
    query, key, value = jnp.asarray(jax.random.normal(jax.random.key(0), (3, 1, 12, 2, 16)), dtype)
    bias = jnp.zeros((1, 12)).at[:, :6].set(-jnp.inf)
    low, lowest = 0.49 * jnp.finfo("float32").min, jnp.finfo("float32").max

    def attend(value: Any, **added: Any) -> Any:
        return na1d(query, key, value, 3, key_bias=bias, return_lse=True, backend=FAMILY.fna, **added)

    for relative_bias in (jnp.full((2, 5), low), jnp.full((2, 5), low).at[:, 2].set(-lowest)):
        (out, lse), pullback = jax.vjp(lambda value, table=relative_bias: attend(value, relative_bias=table), value)
        np.testing.assert_array_equal(out[:, :5], 0)
        assert np.isneginf(lse[:, :5]).all() and np.isfinite(lse[:, 7:]).all()
        keys = [7, 9] if relative_bias[0, 2] == -lowest else [7, 8, 9]
        mean = np.asarray(value[:, keys], np.float32).mean(axis=1)
        if dtype != "float16":  # float16 columns clip low biases, so query/key products still change the weights
            np.testing.assert_allclose(np.asarray(out[:, 8], np.float32), mean, atol=0.02)
        value_gradient = pullback((jnp.ones_like(out), jnp.zeros_like(lse)))[0]
        np.testing.assert_array_equal(value_gradient[:, :6], 0)

    # The largest relative bias has no effect on keys that the key bias masks out.
    out, lse = attend(value, relative_bias=jnp.full((2, 5), lowest))
    np.testing.assert_array_equal(out[:, :5], 0)
    assert np.isneginf(lse[:, :5]).all()

    # The first five queries see no keys, only the sink.
    (out, lse), pullback = jax.vjp(lambda sinks: attend(value, sinks=sinks), jnp.full(2, low))
    assert np.isfinite(lse).all()
    sink_gradient = pullback((jnp.zeros_like(out), jnp.ones_like(lse).at[:, 5:].set(0)))[0]
    np.testing.assert_allclose(sink_gradient, 5)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_halos_bring_biases(kind: str) -> None:
    mesh = mesh_of(kind, x=2, y=2)
    arrays = [jax.random.normal(jax.random.key(i), (2, 8, 12, heads, 8)) for i, heads in enumerate((4, 2, 2))]
    bias = jnp.where(jax.random.uniform(jax.random.key(3), (2, 4, 8, 12)) < 0.7, 1.5, -jnp.inf)

    def gradients(backend: str, *arrays: Any) -> Any:
        def loss(query: Any, key: Any, value: Any, bias: Any) -> Any:
            out, lse = na2d(query, key, value, 5, key_bias=bias, return_lse=True, backend=backend)
            return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(jnp.isfinite(lse), jnp.cos(lse), 0))

        return jax.jit(jax.grad(loss, (0, 1, 2, 3)))(*arrays)

    expected = gradients("flex-fna", *arrays, bias)
    with jax.set_mesh(mesh):
        placed = [put(array, mesh, None, "x", "y") for array in arrays]
        assert_close(gradients(FAMILY.fna, *placed, put(bias, mesh, None, None, "x", "y")), expected, atol=3e-5)


# Head dimensions that the kernels support only with padding.


NARROW = [
    Case((23,), (5,), head_dim=12, head_dim_v=20, batch=2, heads=4, heads_kv=2),
    Case((6, 7), (3, 3), head_dim=1, head_dim_v=17, additional=3, fused=True, is_causal=(True, False)),
    Case((6, 7), (3, 2), head_dim=9, additional=2, heads=2, scales=(0.3, -0.5)),
    Case((24,), (5,), head_dim=13, heads=4, heads_kv=2, scales=(0.3, -0.5, 0.0, 1.7)),
    Case((30,), queries=17, is_causal=(True,), head_dim=3, head_dim_v=8, scale=-0.4),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_zero_padding_of_heads_has_no_effect(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuBackend, "capabilities", dataclasses.replace(CpuBackend.capabilities, head_dim_step=8))
    backends.select.decided.cache_clear()  # discard plans that were made with another head_dim_step
    problem = problem_of((23,), 5, head_dim=12, head_dim_v=20, dtype=dtype)
    plan = resolve(Request(problem, backend="cpu-fna"), default_device(), "forward")
    assert (plan.problem.head_dim, plan.problem.head_dim_v, plan.problem.scale) == (16, 24, 12**-0.5)
    check_all([Trial(case, dtype) for case in NARROW], family_named("cpu"))
    backends.select.decided.cache_clear()
