"""Scales that are arrays, of every head or one for each: as accurate as numbers, differentiable, mapped and split."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import natten_jax
from tests.support import oracle
from tests.support.families import Family
from tests.support.problems import (
    OPERATORS,
    QUICK_COMPILATION,
    Case,
    Trial,
    check_all,
    element_types,
    expected_of,
    relative_error,
)
from tests.support.programs import run_python

LARGEST = float(np.finfo(np.float32).max) / np.log2(np.e)


def quick(function: Any) -> Any:
    return jax.jit(function, compiler_options=QUICK_COMPILATION)


def test_every_element_type(family: Family, other_dtype: str) -> None:
    cases = [
        Case((7, 9), (3, 4), stride=(2, 1), is_causal=(True, False), scales=(0.3, -0.5, 0.0, 1.7), heads=4, heads_kv=4),
        Case((24,), (5,), additional=7, fused=True, scales=(0.3, -0.5, 0.0, 1.7), heads=4, heads_kv=2, batch=2),
        Case((40,), (30,), scales=(-0.09,), heads=2, head_dim=128),
        Case((4, 5), (4, 5), scales=(0.2, 1e-6), heads=2, heads_kv=2),
    ]
    check_all([Trial(case, other_dtype) for case in cases], family)


@pytest.mark.parametrize("operator", ["fna", "fmha"])
def test_steep_logits_are_as_accurate_as_with_a_number(family: Family, dtype: str, operator: str) -> None:
    # The scale is no power of two: a query of 16 bits that it is multiplied into is rounded, by 0.06 of the output.
    number = 128**-0.5
    plain = Case((48,), (21,), heads=2, heads_kv=2, head_dim=128).fitted(family)
    if operator == "fmha":
        plain = dataclasses.replace(plain, kernel_size=None, queries=40)
    found = {}
    with element_types(dtype):
        for case in (plain, dataclasses.replace(plain, scales=(number, number))):
            query, key, *others = case.host_operands(dtype, 0)
            operands = oracle.Tensors(4 * query, 4 * key, *others)
            cotangents = case.host_cotangents(dtype, 0)
            run = quick(lambda o, c, case=case: _both(case.operator(getattr(family, operator)), o, c))
            outputs, gradients = run(operands, cotangents)
            reference = dataclasses.replace(case, scale=number)
            expected = expected_of(reference, operands._replace(scale=None), cotangents)
            found[case.scales] = [
                relative_error(outputs[0], expected.forward.out, expected.forward_magnitude.out),
                *(
                    relative_error(
                        getattr(gradients, name),
                        getattr(expected.gradients, name),
                        getattr(expected.gradient_magnitude, name),
                    )
                    for name in ("query", "key", "value")
                ),
            ]
    of_number, of_operand = found.values()
    for one, other in zip(of_number, of_operand, strict=True):
        assert other <= 1.05 * one + 1e-7


def _both(function: Any, operands: oracle.Tensors, cotangents: Any) -> Any:
    outputs, pullback = jax.vjp(function, operands)
    return outputs, pullback(cotangents)[0]


def _arrays(family: Family, heads: int = 3, batch: int = 2) -> Any:
    width = 8 * family.head_dim_step
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.normal(size=(batch, 12, heads, width)), family.dtype) for _ in range(3))


@pytest.mark.parametrize("kind", ["jax", "numpy", "python"])
def test_arrays_without_dimensions_whose_value_is_known_are_numbers(family: Family, kind: str) -> None:
    arrays = _arrays(family)
    scale = {"jax": jnp.float32(0.3), "numpy": np.array(np.float32(0.3)), "python": float(np.float32(0.3))}[kind]

    def attend(scale: Any) -> Any:
        return OPERATORS[1](*arrays, 5, scale=scale, backend=family.fna)

    expected = attend(float(np.float32(0.3)))
    np.testing.assert_array_equal(attend(scale), expected)
    # What does not depend on an argument is computed by the compiler, which rounds otherwise.
    np.testing.assert_allclose(
        jax.jit(lambda: attend(scale))(), expected, atol=1e-6 if family.backend.is_plain_xla else 0
    )


@pytest.mark.parametrize(
    "scale", [jnp.float32(np.inf), np.array(np.nan), jnp.bfloat16(3.3e38), np.array([0.3, np.inf])]
)
def test_known_values_obey_the_rules_of_numbers(scale: Any) -> None:
    query = jnp.ones((1, 6, 2, 8))
    with pytest.raises(ValueError, match=r"^scale(\[1\])? must be (finite|within)"):
        natten_jax.na1d(query, query, query, 3, scale=scale)
    with pytest.raises(ValueError, match=r"^scale(\[1\])? must be (finite|within)"):
        natten_jax.attention(query, query, query, scale)


def test_shapes_and_types_of_scales() -> None:
    query = jnp.ones((1, 6, 2, 8))
    for shape in ((1,), (3,), (2, 1), (1, 2), (0,)):
        with pytest.raises(ValueError, match=r"^scale has shape .*2 query heads"):
            natten_jax.na1d(query, query, query, 3, scale=jnp.ones(shape))
        with pytest.raises(ValueError, match=r"^scale has shape .*2 query heads"):
            jax.jit(lambda scale: natten_jax.attention(query, query, query, scale))(jnp.ones(shape))
    for dtype in ("complex64", "bool"):
        for array in (np.ones(2, dtype), jnp.ones((), dtype)):
            with pytest.raises(TypeError, match=r"^scale must be"):
                jax.jit(lambda scale: natten_jax.na1d(query, query, query, 3, scale=scale))(array)
            with pytest.raises(TypeError, match=r"^scale must be"):
                natten_jax.na1d(query, query, query, 3, scale=array)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "int32"])
def test_element_types_of_scales(dtype: str) -> None:
    with jax.enable_x64(dtype == "float64"):
        query = jnp.asarray(np.random.default_rng(0).normal(size=(1, 6, 2, 8)), "float32")
        scale = jnp.asarray([0.5, 2.0] if dtype != "int32" else [1, 2], dtype)

        def attend(scale: Any) -> jax.Array:
            return natten_jax.na1d(query, query, query, 3, scale=scale)

        expected = attend(scale.astype("float32"))
        np.testing.assert_array_equal(jax.jit(attend)(scale), expected)
        np.testing.assert_array_equal(attend(np.asarray(scale)), expected)
        if dtype != "int32":
            assert jax.grad(lambda scale: attend(scale).sum())(scale).dtype == dtype


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 3e38])
def test_a_traced_scale_that_no_number_could_be_gives_nan(native_family: Family, value: float) -> None:
    arrays = _arrays(native_family, heads=2)

    @quick
    def run(scale: jax.Array) -> Any:
        out, pullback = jax.vjp(
            lambda *operands: OPERATORS[1](*operands[:3], 5, scale=operands[3], backend=native_family.fna),
            *(*arrays, scale),
        )
        return out, pullback(jnp.ones_like(out))

    out, gradients = run(jnp.array([value, 0.3], "float32"))
    expected, expected_gradients = run(jnp.array([0.3, 0.3], "float32"))
    assert np.isnan(out[:, :, 0]).all()
    np.testing.assert_array_equal(out[:, :, 1], expected[:, :, 1])
    assert np.isnan(gradients[3][0])
    np.testing.assert_allclose(gradients[3][1], expected_gradients[3][1], rtol=1e-5)


@pytest.mark.parametrize("backend", ["cpu-fmha", "flex-fmha"])
def test_the_largest_scales_do_not_overflow(backend: str) -> None:
    tiny = 2.0**-125
    query = jnp.array([tiny, 0.0]).reshape(1, 2, 1, 1).repeat(2, 2)
    numbers = np.array([1.0, 1.5, 2.0])
    key = jnp.asarray(numbers, "float32").reshape(1, 3, 1, 1).repeat(2, 2)
    scales = np.float32(LARGEST * (1 - 1e-6)) * np.array([1, -1], np.float32)
    found, gradients_of = jax.vjp(
        lambda q, s: natten_jax.attention(q, key, key, s, backend=backend), query, jnp.asarray(scales)
    )
    for head, scale in enumerate(scales.astype(np.float64)):
        weights = np.exp(np.outer([scale * tiny, 0.0], numbers))
        np.testing.assert_allclose(found[0, :, head, 0], weights @ numbers / weights.sum(axis=1), rtol=2e-6)
    assert all(np.isfinite(each).all() for each in gradients_of(jnp.ones_like(found)))


@pytest.mark.parametrize("is_per_head", [False, True])
def test_mapped_scales(family: Family, is_per_head: bool) -> None:
    arrays = _arrays(family)
    scales = jnp.asarray(np.random.default_rng(1).normal(size=(3, 3) if is_per_head else (3,)), "float32")

    def gradients(query: jax.Array, scale: jax.Array) -> Any:
        def loss(query: jax.Array, scale: jax.Array) -> jax.Array:
            out = OPERATORS[1](query, *arrays[1:], 5, scale=scale, backend=family.fna)
            return jnp.sum(out.astype("float32") ** 2)

        return jax.value_and_grad(loss, (0, 1))(query, scale)

    @quick
    def run(scales: jax.Array) -> Any:
        shared = jax.vmap(gradients, (None, 0))(arrays[0], scales)
        both = jax.vmap(gradients, (0, 0))(jnp.stack([arrays[0]] * 3), scales)
        fixed = jax.vmap(gradients, (0, None))(jnp.stack([arrays[0]] * 2), scales[0])
        return shared, both, fixed, [gradients(arrays[0], scale) for scale in scales]

    shared, both, fixed, alone = run(scales)
    tolerance = {"float32": 1e-5, "float64": 1e-12}.get(family.dtype, 2e-2)

    def assert_close(found: Any, expected: Any) -> None:
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
            np.testing.assert_allclose(one, other, atol=tolerance * np.abs(other).max())

    for i, expected in enumerate(alone):
        assert_close(jax.tree.map(lambda a, i=i: a[i], shared), expected)
        assert_close(jax.tree.map(lambda a, i=i: a[i], both), expected)
    assert_close(jax.tree.map(lambda a: a[1], fixed), alone[0])


def test_any_order_of_derivatives_and_forward_mode(pure_family: Family) -> None:
    with element_types("float64"):
        case = Case(
            (7,), (3,), stride=(2,), head_dim=3, additional=1, fused=True, heads=2, heads_kv=2, scales=(0.7, 0.0)
        )
        operands, cotangents = case.operands("float64", 0), case.cotangents("float64", 0)
        direction = case.operands("float64", 1)._replace(scale=jnp.array([0.3, -1.0]))

        def objective(operands: oracle.Tensors) -> jax.Array:
            out, lse = case.operator(pure_family.fna)(operands)
            return jnp.vdot(out, cotangents[0]) + jnp.vdot(lse, cotangents[1]) + jnp.sum(out**2)

        @quick
        def run(operands: oracle.Tensors) -> Any:
            slope = jax.jvp(objective, (operands,), (direction,))[1]
            forwards = jax.jvp(jax.grad(objective), (operands,), (direction,))[1]
            return slope, jax.grad(objective)(operands), forwards

        slope, gradient, product = run(operands)
        for found, expected in ((slope, _dot(gradient, direction)), (_dot(product, direction), None)):
            if expected is not None:
                np.testing.assert_allclose(found, expected, rtol=1e-11)
        step = 1e-5
        ahead, behind = (run(jax.tree.map(lambda a, d, h=h: a + h * d, operands, direction))[1] for h in (step, -step))
        for one, a, b in zip(*map(jax.tree.leaves, (product, ahead, behind)), strict=True):
            np.testing.assert_allclose(one, (a - b) / (2 * step), rtol=1e-6, atol=1e-7)


def _dot(one: Any, other: Any) -> Any:
    return sum(jnp.vdot(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


def test_values_of_a_scale_share_a_program(family: Family) -> None:
    arrays = _arrays(family)
    traces = 0

    @jax.jit
    def attend(scale: jax.Array) -> jax.Array:
        nonlocal traces
        traces += 1
        return OPERATORS[1](*arrays, 5, scale=scale, backend=family.fna)

    for value in (0.1, -2.0, 0.0):
        attend(jnp.float32(value))
    assert traces == 1


def test_a_learned_scale_finds_its_value(family: Family) -> None:
    query, key, value = _arrays(family)
    aim = jnp.array([0.3, -0.2, 0.0], "float32")

    def attend(scale: jax.Array) -> jax.Array:
        return OPERATORS[1](query, key, value, 5, scale=scale, backend=family.fna).astype("float32")

    expected = quick(attend)(aim)

    @quick
    def slope(scale: jax.Array) -> jax.Array:
        return jax.grad(lambda scale: jnp.sum((attend(scale) - expected) ** 2))(scale)

    ahead, behind = slope(aim + 0.05), slope(aim - 0.05)
    assert (ahead > 0).all() and (behind < 0).all()


MESHES = """
import functools, json, warnings
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import natten_jax

warnings.simplefilter("ignore")
backend = "BACKEND"
rng = np.random.default_rng(0)
query, cotangent = (jnp.asarray(rng.normal(size=(2, 8, 6, 4, 8)), "float32") for _ in range(2))
key, value = (jnp.asarray(rng.normal(size=(2, 8, 6, 2, 8)), "float32") for _ in range(2))
more = jnp.asarray(rng.normal(size=(2, 3, 2, 8)), "float32")
scales = {"heads": jnp.array([0.3, -0.4, 0.0, 0.9]), "all": jnp.float32(0.3)}

def run_one(query, key, value, more, scale, cotangent, token_axes=None):
    def attend(query, key, value, more, scale):
        return natten_jax.na2d(
            query, key, value, (3, 3), is_causal=(True, False), scale=scale, additional_keys=more,
            additional_values=more, backend=backend, token_axes=token_axes,
        )
    out, pullback = jax.vjp(attend, query, key, value, more, scale)
    return (out, *pullback(cotangent))

# One program for both: most of each is what comes before its kernels.
def run(query, key, value, more, scales, cotangent, **options):
    return {name: run_one(query, key, value, more, scale, cotangent, **options) for name, scale in scales.items()}

report = {}
expected = jax.jit(run)(query, key, value, more, scales, cotangent)
def compare(where, found):
    for name, results in expected.items():
        pairs = zip(found[name], results, strict=True)
        report[f"{name}, {where}"] = max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs)

for split, names in {
    "batch": P("x"), "tokens": P(None, "x"), "heads": P(None, None, None, "x"), "both": P("y", "x"),
    "tokens and heads": P(None, "x", None, "y"), "two dimensions": P(None, "x", "y"),
}.items():
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind,) * 2)
        heads = names[3] if len(names) > 3 else None
        def put(array, spec):
            return jax.device_put(array, NamedSharding(mesh, spec))
        placed = {name: put(scale, P(heads) if scale.ndim else P()) for name, scale in scales.items()}
        arrays = (put(query, names), put(key, names), put(value, names), put(more, P(names[0], None, heads)),
                  placed, put(cotangent, names))
        with jax.set_mesh(mesh):
            compare(f"{split}, {kind.name}", jax.jit(run)(*arrays))
mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
tokens = P(None, "x", None, "y")
of_scales = {"heads": P("y"), "all": P()}
specs = (tokens, tokens, tokens, P(None, None, "y"), of_scales, tokens)
results = {name: (tokens, *specs[:4], spec) for name, spec in of_scales.items()}
local = jax.shard_map(functools.partial(run, token_axes=("x", None)), mesh=mesh, in_specs=specs, out_specs=results)
compare("shard_map", jax.jit(local)(query, key, value, more, scales, cotangent))
print(json.dumps(report))
"""


@pytest.mark.parametrize("backend", ["cpu-fna", "flex-fna"])
def test_scales_on_meshes(backend: str) -> None:
    result = run_python(MESHES.replace("BACKEND", backend), devices=4, timeout=600)
    assert result.returncode == 0, result.stderr[-3000:]
    report = json.loads(result.stdout.splitlines()[-1])
    assert len(report) == 26
    assert not {name: error for name, error in report.items() if not error < 1e-4}


def test_an_exported_scale_keeps_its_batch_symbolic(family: Family) -> None:
    if family.needs_gpu:
        pytest.skip("exported on the host, for the host")
    from jax import export

    (batch,) = export.symbolic_shape("batch")
    arrays = _arrays(family)
    shape = jax.ShapeDtypeStruct((batch, *arrays[0].shape[1:]), family.dtype)

    def attend(query: Any, key: Any, value: Any, scale: Any) -> Any:
        return OPERATORS[1](query, key, value, 5, scale=scale, backend=family.fna)

    scale = jnp.array([0.3, -0.4, 0.0], "float32")
    checks = [export.DisabledSafetyCheck.custom_call(target) for target in family.backend.targets.get("forward", ())]
    exported = export.export(jax.jit(attend), disabled_checks=checks)(
        shape, shape, shape, jax.ShapeDtypeStruct(scale.shape, scale.dtype)
    )
    restored = export.deserialize(exported.serialize())
    query, key, value = arrays
    np.testing.assert_allclose(restored.call(*arrays, scale), attend(query, key, value, scale), atol=1e-6)


def test_ranks_and_attention_take_arrays(family: Family) -> None:
    rng = np.random.default_rng(0)
    scale = jnp.array([0.3, -0.4], "float32")
    width = 8 * family.head_dim_step
    for rank in (1, 2, 3):
        arrays = [jnp.asarray(rng.normal(size=(1, *(4,) * rank, 2, width)), family.dtype) for _ in range(3)]
        both = quick(lambda s, arrays=arrays, rank=rank: OPERATORS[rank](*arrays, 3, scale=s, backend=family.fna))(
            scale
        )
        for head, number in enumerate((0.3, -0.4)):
            one = OPERATORS[rank](*arrays, 3, scale=number, backend=family.fna)
            np.testing.assert_allclose(
                np.asarray(both[..., head, :], np.float32), np.asarray(one[..., head, :], np.float32), atol=1e-2
            )
