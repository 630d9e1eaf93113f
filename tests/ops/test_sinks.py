"""Sinks of heads: a logit more in the denominator, on every backend, with derivatives of every kind."""

from __future__ import annotations

import json
import re
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import natten_jax
from natten_jax.plan.devices import Device
from tests.support.families import Family
from tests.support.machine import Machine
from tests.support.problems import QUICK_COMPILATION, Case, Trial, check_all
from tests.support.programs import output_of, run_python

CASES = [
    Case((37,), (7,), sinks=True, heads=2, heads_kv=1, batch=2),
    Case((7, 9), (3, 4), stride=(2, 1), is_causal=(True, False), sinks=True, heads=4, heads_kv=4),
    Case((3, 4, 5), (3, 2, 5), sinks=True, heads=2, heads_kv=2),
    Case((24,), (5,), additional=7, fused=True, sinks=True, heads=2, heads_kv=1),
    Case((24,), (5,), additional=7, sinks=True, heads=2, heads_kv=1, scales=(0.3, -0.5)),
    Case((4, 5), (4, 5), additional=3, sinks=True),
    Case((40,), queries=25, heads=4, heads_kv=2, sinks=True, head_dim=16),
    Case((40,), queries=25, is_causal=(True,), sinks=True, head_dim=16),
]


def test_sinks_are_in_the_denominator(family: Family) -> None:
    check_all([Trial(case, family.dtype) for case in CASES], family)


def test_every_element_type(family: Family, other_dtype: str) -> None:
    check_all([Trial(case, other_dtype) for case in CASES[::3]], family)


@given(
    logit=st.floats(-80, 80, width=32),
    sink=st.one_of(st.floats(-200, 200, width=32), st.just(float("-inf"))),
)
def test_one_key_and_a_sink_are_a_sigmoid(logit: float, sink: float) -> None:
    query, key = jnp.full((1, 1, 1, 1), logit), jnp.ones((1, 1, 1, 1))
    out, logsumexp = natten_jax.attention(query, key, key, 1.0, sinks=jnp.float32([sink]), return_lse=True)
    np.testing.assert_allclose(float(out.squeeze()), 1 / (1 + np.exp(np.float64(sink) - logit)), rtol=1e-4, atol=1e-37)
    np.testing.assert_allclose(float(logsumexp.squeeze()), np.logaddexp(logit, sink), rtol=1e-6, atol=1e-6)


def test_a_sink_of_minus_infinity_is_none_and_has_no_gradient() -> None:
    array = jax.random.normal(jax.random.key(0), (1, 9, 2, 8))

    def attend(sinks: Any) -> Any:
        return natten_jax.na1d(array, array, array, 3, sinks=sinks, return_lse=True)

    none = jnp.full((2,), -jnp.inf)
    for one, other in zip(attend(none), attend(None), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    gradient = jax.grad(lambda sinks: sum(jnp.sum(jnp.sin(each)) for each in attend(sinks)))(none)
    np.testing.assert_array_equal(gradient, 0)


@pytest.mark.parametrize("backend", ["flex-fna", "flex-fmha"])
def test_derivatives_of_derivatives(backend: str) -> None:
    array = jax.random.normal(jax.random.key(0), (1, 6, 2, 8))
    sinks = jnp.float32([0.3, -0.7])

    def loss(sinks: Any, query: Any) -> Any:
        if backend == "flex-fmha":
            out = natten_jax.attention(query, array, array, sinks=sinks, backend=backend)
        else:
            out = natten_jax.na1d(query, array, array, 3, sinks=sinks, backend=backend)
        return jnp.sum(jnp.sin(out))

    def dense(sinks: Any, query: Any) -> Any:
        logits = jnp.einsum("bqhd,bkhd->bhqk", query, array) * 8**-0.5
        if backend == "flex-fna":
            start = jnp.clip(jnp.arange(6) - 1, 0, 3)[:, None]
            logits = jnp.where((jnp.arange(6) >= start) & (jnp.arange(6) < start + 3), logits, -jnp.inf)
        logits = jnp.concatenate([logits, jnp.broadcast_to(sinks[:, None, None], (1, 2, 6, 1))], axis=-1)
        out = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits)[..., :6], array)
        return jnp.sum(jnp.sin(out))

    for derivative in (jax.hessian, lambda f: jax.jacfwd(jax.grad(f, argnums=1))):
        found, expected = (
            jax.jit(derivative(f), compiler_options=QUICK_COMPILATION)(sinks, array) for f in (loss, dense)
        )
        np.testing.assert_allclose(found, expected, atol=2e-6)


@pytest.mark.parametrize("kernel_size", [7, 63], ids=["small windows", "large windows"])
def test_kernels_for_gpus_have_them_in_the_softmax(machine: Machine, kernel_size: int) -> None:
    """Nothing reads the output once more."""
    machine.has(Device("cuda", (9, 0), is_present=False))
    query = jax.ShapeDtypeStruct((2, 64, 64, 4, 32), "bfloat16")

    def attend(query: Any, sinks: Any) -> Any:
        return natten_jax.na2d(query, query, query, kernel_size, sinks=sinks)

    exported = jax.export.export(jax.jit(attend), platforms=["cuda"], disabled_checks=natten_jax.EXPORT_CHECKS)(
        query, jax.ShapeDtypeStruct((4,), "float32")
    )
    text = str(exported.mlir_module())
    assert len(re.findall(r"custom_call @natten_jax_sm", text)) == 1
    assert "2x64x64x4x32xf32" not in text


def test_vmap_over_sinks_is_a_loop() -> None:
    array = jax.random.normal(jax.random.key(0), (1, 9, 2, 8))
    sinks = jax.random.normal(jax.random.key(1), (3, 2))

    def attend(sinks: Any) -> Any:
        return natten_jax.na1d(array, array, array, 3, sinks=sinks)

    np.testing.assert_allclose(jax.vmap(attend)(sinks), jnp.stack([attend(each) for each in sinks]), rtol=1e-6)


@pytest.mark.parametrize("operator", ["na1d", "attention"])
def test_other_arrays_are_refused(operator: str) -> None:
    array = jnp.ones((1, 6, 2, 8), jnp.bfloat16)

    def call(sinks: Any) -> Any:
        if operator == "na1d":
            return natten_jax.na1d(array, array, array, 3, sinks=sinks)
        return natten_jax.attention(array, array, array, sinks=sinks)

    for shape in ((), (1,), (3,), (1, 2), (2, 1)):
        with pytest.raises(ValueError, match=r"^sinks has shape .*\(2,\)"):
            call(jnp.ones(shape))
        with pytest.raises(ValueError, match=r"^sinks has shape .*\(2,\)"):
            jax.eval_shape(call, jnp.ones(shape))
    for dtype in ("bool", "int32"):
        with pytest.raises(ValueError, match=rf"^sinks has dtype {dtype}, but .* are supported"):
            call(jnp.ones(2, dtype))
    with pytest.raises(TypeError, match=r"^sinks must be an array, got list"):
        call([1.0, 2.0])
    assert call(np.ones(2)).dtype == call(jnp.ones(2, "bfloat16")).dtype == jnp.bfloat16


_SPLIT = """
import json, re, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import natten_jax

kind = AxisType[sys.argv[1]]
mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind, kind))
arrays = [jax.random.normal(jax.random.key(i), (4, 12, 4, 8)) for i in range(3)]
sinks = jax.random.normal(jax.random.key(3), (4,))

def loss(query, key, value, sinks):
    out, lse = natten_jax.na1d(query, key, value, 3, sinks=sinks, return_lse=True)
    return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(lse))

gradients = jax.grad(loss, argnums=(0, 1, 2, 3))
expected = jax.jit(gradients)(*arrays, sinks)
with jax.set_mesh(mesh):
    for batch, tokens, heads, of_sinks in (
        ("x", None, "y", "y"), ("x", None, "y", None), ("y", None, None, "y"), (None, None, ("x", "y"), "x"),
        ("y", "x", None, None), (None, "y", "x", "x"),
    ):
        spec = P(batch, tokens, heads, None)
        placed = [jax.device_put(array, NamedSharding(mesh, spec)) for array in arrays]
        placed.append(jax.device_put(sinks, NamedSharding(mesh, P(of_sinks))))
        compiled = jax.jit(gradients).lower(*placed).compile()
        found = compiled(*placed)
        gathers = len(re.findall(r" all-gather(?:-start)?\\(", compiled.as_text()))
        distances = [float(abs(np.asarray(a) - np.asarray(b)).max()) for a, b in zip(found, expected)]
        print(json.dumps([of_sinks == heads, gathers, max(distances)]))
"""


@pytest.mark.parametrize("mode", ["Auto", "Explicit"])
def test_sinks_of_split_heads_stay_split(mode: str) -> None:
    found = [json.loads(line) for line in output_of(run_python(_SPLIT, mode, devices=4)).splitlines()]
    assert len(found) == 6
    for is_split_alike, gathers, distance in found:
        assert distance < 1e-5
        assert gathers == 0 or not is_split_alike
