"""Relative biases and biases of keys: against the oracle, with derivatives of every kind, mapped, split and refused."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import natten_jax
from natten_jax import backends
from natten_jax.backends.select import resolve
from natten_jax.plan.devices import default_device
from natten_jax.plan.plan import Request
from natten_jax.problem import problem_of
from tests.support import oracle
from tests.support.families import FAMILIES, Family
from tests.support.problems import OPERATORS, QUICK_COMPILATION, Case, Trial, check_all, element_types
from tests.support.programs import output_of, run_python

#: Every feature of the operators beside a bias.
CASES = {
    "plain": Case((13,), (5,), relative_bias=True, heads=2, heads_kv=1, batch=2),
    "even, strided, dilated, causal": Case(
        (9, 14),
        (4, 3),
        stride=(2, 1),
        dilation=(1, 3),
        is_causal=(False, True),
        relative_bias=True,
        heads=2,
        heads_kv=2,
    ),
    "stride is window": Case((23,), (6,), stride=(6,), relative_bias=True, key_bias="heads"),
    "causal stride": Case((31,), (9,), stride=(4,), is_causal=(True,), relative_bias=True, head_dim_v=20),
    "3d, additional": Case(
        (3, 5, 6), (3, 2, 5), relative_bias=True, heads=2, heads_kv=2, additional=3, fused=True, dilation=(1, 2, 1)
    ),
    "additional merged": Case((24,), (5,), relative_bias=True, key_bias="tokens", heads=2, heads_kv=1, additional=7),
    "whole layout": Case((4, 5), (4, 5), relative_bias=True, additional=3, fused=True),
    "windows of one": Case((7,), (1,), relative_bias=True, heads=2),
    "many tiles": Case((300,), (190,), stride=(7,), relative_bias=True, key_bias="tokens", sinks=True),
    "keys": Case((24,), (5,), key_bias="tokens", hidden=0.4, heads=2, heads_kv=1, batch=2),
    "keys of heads": Case(
        (6, 9),
        (2, 4),
        key_bias="heads",
        hidden=0.6,
        heads=4,
        heads_kv=2,
        relative_bias=True,
        scales=(0.3, -0.5, 0.0, 1.0),
    ),
    "keys of a whole layout": Case((4, 5), (4, 5), additional=3, key_bias="heads", heads=2, hidden=0.3, sinks=True),
    "cut and wrap": Case(
        (9, 12), (5, 4), stride=(1, 3), dilation=(1, 2), edges=("cut", "wrap"), relative_bias=True, key_bias="tokens"
    ),
    "wraps around all": Case((4, 9), (3, 9), edges=("wrap", "wrap"), relative_bias=True),
    "box": Case(
        (9, 12),
        (3, 5),
        dilation=(2, 1),
        batch=2,
        box=(4, 5),
        origins=((2, 3), (5, 7)),
        relative_bias=True,
        key_bias="heads",
    ),
    "padded": Case(
        (9, 10),
        (3, 5),
        batch=2,
        extents=((9, 7), (5, 10)),
        relative_bias=True,
        key_bias="tokens",
        sinks=True,
        additional=2,
    ),
    "finer grid": Case((5, 6), (3, 4), upsample=(2, 1), key_bias="heads", sinks=True, heads=2, heads_kv=1),
    "padded attention": Case(
        (30,), queries=20, batch=2, extents=((11,), (30,)), query_lengths=(20, 7), key_bias="heads", sinks=True
    ),
    "attention": Case((40,), queries=25, key_bias="heads", hidden=0.2, heads=4, heads_kv=2, is_causal=(True,)),
    "attention, negative scale": Case((90,), queries=70, key_bias="tokens", scale=-0.2, batch=2),
}


def taking(name: str) -> tuple[Family, ...]:
    """The families whose kernels add such a bias."""
    return tuple(family for family in FAMILIES if name in family.backend.biases and not family.needs_gpu)


BOTH = [pytest.param(family, id=family.name) for family in taking("relative_bias")]


@pytest.mark.parametrize("of", BOTH)
def test_biases_are_added_to_logits(of: Family) -> None:
    check_all([Trial(case, of.dtype) for case in CASES.values()], of)


@pytest.mark.parametrize(
    ("of", "dtype"), [(each, dtype) for each in taking("relative_bias") for dtype in each.dtypes[1:]]
)
def test_every_element_type(of: Family, dtype: str) -> None:
    names = "even, strided, dilated, causal", "keys of heads"
    check_all([Trial(CASES[name], dtype) for name in names], of)


def test_plain_jax_and_host_kernels_add_both() -> None:
    assert {"flex", "cpu"} <= {family.name for family in taking("relative_bias")} & {
        family.name for family in taking("key_bias")
    }


@given(seed=st.integers(0, 2**31 - 1), shift=st.floats(-50, 50, width=32))
@settings(max_examples=15)
def test_a_constant_table_changes_the_logsumexp_alone(seed: int, shift: float) -> None:
    query, key, value = jax.random.normal(jax.random.key(seed), (3, 1, 9, 2, 8))
    table = jnp.full((2, 5), shift)
    out, lse = natten_jax.na1d(query, key, value, 3, return_lse=True)
    shifted, shifted_lse = natten_jax.na1d(query, key, value, 3, relative_bias=table, return_lse=True)
    np.testing.assert_allclose(shifted, out, atol=2e-5)
    np.testing.assert_allclose(shifted_lse, lse + shift, atol=2e-5)


@pytest.mark.parametrize("of", BOTH)
def test_entries_of_minus_infinity_make_a_smaller_window(of: Family) -> None:
    """A table whose outer entries hide is the mask of a narrower window, wherever windows are not shifted."""
    query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 24, 2, 8))
    table = jnp.full((2, 13), -jnp.inf).at[:, 5:8].set(0)

    def attend(kernel_size: int, bias: Any = None) -> Any:
        def loss(query: Any, key: Any, value: Any) -> Any:
            out = natten_jax.na1d(query, key, value, kernel_size, relative_bias=bias, backend=of.fna)
            return jnp.sum(jnp.sin(out[:, 3:-3]))

        return jax.value_and_grad(loss, (0, 1, 2))(query, key, value)

    found, expected = attend(7, table), attend(3)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


@pytest.mark.parametrize("of", BOTH)
def test_a_query_that_sees_nothing_has_no_gradients(of: Family) -> None:
    operands = jax.random.normal(jax.random.key(0), (3, 2, 12, 2, 8))
    bias = jnp.zeros((2, 12)).at[0, :7].set(-jnp.inf)
    table = jax.random.normal(jax.random.key(1), (2, 9))

    def attend(query: Any, key: Any, value: Any, bias: Any, table: Any) -> Any:
        return natten_jax.na1d(
            query, key, value, 5, key_bias=bias, relative_bias=table, backend=of.fna, return_lse=True
        )

    (out, lse), transpose = jax.vjp(attend, *operands, bias, table)
    gradients = transpose((jnp.ones_like(out), jnp.ones_like(lse)))
    np.testing.assert_array_equal(out[0, :5], 0)
    np.testing.assert_array_equal(lse[0, :5], -jnp.inf)
    assert np.isfinite(np.asarray(out)).all() and np.isfinite(np.asarray(lse[0, 5:])).all()
    for gradient in gradients:
        assert np.isfinite(np.asarray(gradient)).all()
    np.testing.assert_array_equal(gradients[0][0, :5], 0)
    for hidden in (*gradients[1:3], gradients[3]):
        np.testing.assert_array_equal(hidden[0, :7], 0)


def test_masked_regions_are_as_if_they_were_not_there() -> None:
    query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 6, 8, 2, 8))
    bias = jnp.zeros((1, 6, 8)).at[:, :, 5:].set(-jnp.inf)
    found = natten_jax.na2d(query, key, value, (6, 8), key_bias=bias)[:, :, :5]
    query, key, value = (array[:, :, :5] for array in (query, key, value))
    np.testing.assert_allclose(found, natten_jax.na2d(query, key, value, (6, 5)), atol=2e-5)


def test_derivatives_of_derivatives() -> None:
    case = Case(
        (7,), (3,), dilation=(2,), relative_bias=True, key_bias="heads", heads=2, heads_kv=1, head_dim=4, hidden=0.3
    )
    with element_types("float64"):
        operands = case.operands("float64", 0)
        direction = jax.tree.map(lambda a: jnp.where(jnp.isfinite(a), a, 0), case.operands("float64", 1))
        d_out, d_lse = case.host_cotangents("float64", 0)
        run = case.operator("flex-fna")

        def objective(operands: oracle.Tensors) -> Any:
            out, lse = run(operands)
            return jnp.sum(jnp.sin(out) * d_out) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0) ** 2 * d_lse)

        gradient = jax.jit(jax.grad(objective), compiler_options=QUICK_COMPILATION)
        product = jax.jit(lambda o, d: jax.jvp(jax.grad(objective), (o,), (d,))[1], compiler_options=QUICK_COMPILATION)
        step = 1e-5
        moved = [gradient(jax.tree.map(lambda a, d, s=sign: a + s * step * d, operands, direction)) for sign in (1, -1)]
        expected = jax.tree.map(lambda one, other: (one - other) / (2 * step), *moved)
        found = product(operands, direction)
        over = jax.jit(
            jax.grad(
                lambda o: sum(
                    jnp.vdot(a, d)
                    for a, d in zip(jax.tree.leaves(jax.grad(objective)(o)), jax.tree.leaves(direction), strict=True)
                )
            ),
            compiler_options=QUICK_COMPILATION,
        )(operands)
    for one, other, reversed_ in zip(*map(jax.tree.leaves, (found, expected, over)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-8)
        np.testing.assert_allclose(reversed_, one, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("of", BOTH)
def test_vmap_of_biases_is_a_loop(of: Family) -> None:
    query = jax.random.normal(jax.random.key(0), (2, 9, 2, 8))
    tables, biases = jax.random.normal(jax.random.key(1), (3, 2, 5)), jax.random.normal(jax.random.key(2), (3, 2, 9))

    def gradients(table: Any, bias: Any) -> Any:
        def loss(table: Any, bias: Any) -> Any:
            out = natten_jax.na1d(query, query, query, 3, relative_bias=table, key_bias=bias, backend=of.fna)
            return jnp.sum(jnp.sin(out))

        return jax.value_and_grad(loss, argnums=(0, 1))(table, bias)

    for axes in ((0, 0), (0, None), (None, 0)):
        given = [each if axis == 0 else each[0] for each, axis in zip((tables, biases), axes, strict=True)]
        mapped = jax.jit(jax.vmap(gradients, axes), compiler_options=QUICK_COMPILATION)(*given)
        for i in range(3):
            alone = gradients(*(each[i] if axis == 0 else each for each, axis in zip(given, axes, strict=True)))
            for one, other in zip(jax.tree.leaves(mapped), jax.tree.leaves(alone), strict=True):
                np.testing.assert_allclose(one[i], other, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("of", BOTH)
def test_gradients_of_tables_are_reproducible(of: Family) -> None:
    case = dataclasses.replace(CASES["many tiles"], batch=3, heads=2, heads_kv=1)
    operands, (d_out, d_lse) = case.operands("float32", 0), case.cotangents("float32", 0)

    @jax.jit
    def gradients(operands: Any) -> Any:
        return jax.vjp(case.operator(of.fna), operands)[1]((d_out, d_lse))[0]

    first = jax.tree.leaves(gradients(operands))
    for _ in range(5):
        for one, other in zip(jax.tree.leaves(gradients(operands)), first, strict=True):
            np.testing.assert_array_equal(one, other)


def test_backends_without_a_bias_say_so_and_are_not_chosen() -> None:
    problem = problem_of((8, 8), 3, dtype="float32")
    device = default_device()
    for backend in backends.registered():
        for name in ("relative_bias", "key_bias"):
            asked = dataclasses.replace(problem, relative_bias=name == "relative_bias", key_bias=name == "key_bias")
            reason = backend.rejection(asked, device, "forward")
            if name in backend.biases:
                assert reason == backend.rejection(problem, device, "forward") or name in str(reason)
            elif backend.rejection(problem, device, "forward") is None:
                assert reason == f"it adds no {name} to logits"
            chosen = resolve(Request(asked), device, "forward").backend.family
            assert name in next(each for each in backends.registered() if each.family == chosen).biases


def test_host_kernels_refuse_tables_too_large_to_count() -> None:
    host = backends.find("cpu-fna", "fna")
    device = default_device()
    for extent, heads_kv, is_taken in ((2000, 1, True), (2800, 2, True), (2800, 1, False), (3000, 2, False)):
        problem = problem_of((extent, extent), extent, heads=2, heads_kv=heads_kv, dtype="float32")
        reason = host.rejection(dataclasses.replace(problem, relative_bias=True), device, "forward")
        assert (reason is None) == is_taken
        assert is_taken or f"not {2 // heads_kv * (2 * extent - 1) ** 2}" in str(reason)
        assert host.rejection(problem, device, "forward") is None


def test_windows_as_large_as_the_layout_keep_their_offsets() -> None:
    array = jax.random.normal(jax.random.key(0), (1, 5, 2, 8))
    table = jnp.zeros((2, 9)).at[:, 4].set(100.0)  # each token sees itself alone
    np.testing.assert_allclose(natten_jax.na1d(array, array, array, 5, relative_bias=table), array, rtol=1e-6)


def test_queries_between_tokens_have_no_offsets() -> None:
    key = jnp.ones((1, 6, 2, 8))
    query = jnp.ones((1, 12, 2, 8))
    with pytest.raises(ValueError, match=r"^relative_bias and upsample were both given"):
        natten_jax.na1d(query, key, key, 3, upsample=2, relative_bias=jnp.zeros((2, 5)))


@pytest.mark.parametrize("rank", [1, 2])
def test_other_arrays_are_refused(rank: int) -> None:
    layout, window = ((6,), 3) if rank == 1 else ((6, 5), (3, 2))
    array = jnp.ones((2, *layout, 4, 8), jnp.bfloat16)

    def call(**biases: Any) -> Any:
        return OPERATORS[rank](array, array, array, window, **biases)

    shape = (4, 5) if rank == 1 else (4, 5, 3)
    assert call(relative_bias=np.zeros(shape)).dtype == call(relative_bias=jnp.zeros(shape, "bfloat16")).dtype
    for wrong in ((), shape[1:], (2, *shape[1:]), (1, *shape), (*shape[:-1], shape[-1] + 1), (4, *layout)):
        with pytest.raises(ValueError, match=r"^relative_bias has shape .*4 query heads.*asks for"):
            jax.eval_shape(lambda wrong=wrong: call(relative_bias=jnp.zeros(wrong)))
    for right in ((2, *layout), (2, 4, *layout)):
        assert jax.eval_shape(lambda right=right: call(key_bias=jnp.zeros(right))).shape == array.shape
    for wrong in ((), layout, (1, *layout), (2, 1, *layout), (2, *layout, 4), (2, *layout[:-1], 7)):
        with pytest.raises(ValueError, match=r"^key_bias has shape .*asks for"):
            jax.eval_shape(lambda wrong=wrong: call(key_bias=jnp.zeros(wrong)))
    for name, right in (("relative_bias", shape), ("key_bias", (2, *layout))):
        for dtype in ("int32", "uint8", "bool"):
            with pytest.raises(ValueError, match=rf"^{name} has dtype {dtype}, but .* are supported"):
                call(**{name: jnp.zeros(right, dtype)})
        with pytest.raises(TypeError, match=rf"^{name} must be an array, got list"):
            call(**{name: np.zeros(right).tolist()})


_SPLIT = """
import json, re, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import natten_jax

kind = AxisType[sys.argv[1]]
backend = sys.argv[2]
mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind, kind))
arrays = [jax.random.normal(jax.random.key(i), (4, 8, 12, 4, 8)) for i in range(3)]
arrays += [jax.random.normal(jax.random.key(3), (4, 5, 5)), jax.random.normal(jax.random.key(4), (4, 8, 12))]

def loss(query, key, value, table, bias):
    out, lse = natten_jax.na2d(
        query, key, value, 3, relative_bias=table, key_bias=bias, return_lse=True, backend=backend
    )
    return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(lse))

gradients = jax.grad(loss, argnums=(0, 1, 2, 3, 4))
expected = jax.jit(gradients)(*arrays)
SPLITS = [("x", None, "y", "y"), ("x", None, "y", None), (None, None, ("x", "y"), ("x", "y"))]
SPLITS += [("x", "y", None, None), (None, "x", "y", "y")]
with jax.set_mesh(mesh):
    for batch, tokens, heads, of_table in SPLITS:
        spec = P(batch, tokens, None, heads, None)
        placed = [jax.device_put(array, NamedSharding(mesh, spec)) for array in arrays[:3]]
        placed.append(jax.device_put(arrays[3], NamedSharding(mesh, P(of_table))))
        placed.append(jax.device_put(arrays[4], NamedSharding(mesh, P(batch, tokens))))
        compiled = jax.jit(gradients).lower(*placed).compile()
        found = compiled(*placed)
        gathers = len(re.findall(r" all-gather(?:-start)?\\(", compiled.as_text()))
        distances = [float(abs(np.asarray(a) - np.asarray(b)).max()) for a, b in zip(found, expected)]
        print(json.dumps([of_table == heads, gathers, distances]))
"""


@pytest.mark.parametrize("mode", ["Auto", "Explicit"])
@pytest.mark.parametrize("of", BOTH)
def test_biases_of_split_arrays_stay_split(mode: str, of: Family) -> None:
    found = [json.loads(line) for line in output_of(run_python(_SPLIT, mode, of.fna, devices=4)).splitlines()]
    assert len(found) == 5
    for is_split_alike, gathers, distances in found:
        assert max(distances) < 3e-5, distances
        assert gathers == 0 or not is_split_alike
