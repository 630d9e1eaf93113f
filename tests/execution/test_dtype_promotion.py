"""16-bit arrays where ``jax.numpy_dtype_promotion("strict")`` forbids arrays of different element types to meet."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import natten_jax
from natten_jax.rotary import apply_rotary, rotary_angles
from tests.support.families import Family
from tests.support.problems import Case

PLAIN = Case((5, 6), (3, 4), stride=(2, 1), heads=2, heads_kv=1, batch=2)
CASES = {
    "1d": Case((9,), (3,), dilation=(2,), is_causal=(True,), heads=2, scale=-0.3),
    "3d": Case((3, 4, 5), (2, 3, 3), stride=(1, 2, 1), heads=2),
    "fused": dataclasses.replace(PLAIN, additional=3, fused=True),
    "merged": dataclasses.replace(PLAIN, additional=3),
    "whole": dataclasses.replace(PLAIN, kernel_size=None, additional=3, stride=None),
    "attention": Case((9,), queries=7, heads=4, heads_kv=2),
    "scale": dataclasses.replace(PLAIN, scales=(0.3,)),
    "scales": dataclasses.replace(PLAIN, additional=3, fused=True, scales=(0.3, -0.4)),
    "scales merged": dataclasses.replace(PLAIN, additional=3, scales=(0.3, -0.4)),
}


@pytest.fixture(autouse=True, params=["standard", "raise"])
def _promotion_raises(request: pytest.FixtureRequest) -> Iterator[None]:
    ranks = jax.numpy_rank_promotion("allow" if request.param == "standard" else "raise")
    with jax.numpy_dtype_promotion("strict"), ranks:
        yield


def gradients(function: Callable[..., Any], *operands: Any) -> Any:
    """Gradients of all operands, as they are traced."""

    def total(*operands: Any) -> jax.Array:
        results = jax.tree.leaves(function(*operands))
        return sum((jnp.sum(jnp.sin(each.astype("float32"))) for each in results), jnp.zeros((), "float32"))

    return jax.eval_shape(jax.grad(total, argnums=tuple(range(len(operands)))), *operands)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_operators_and_gradients(family: Family, name: str, half: str) -> None:
    case = CASES[name].fitted(family)
    if half not in family.dtypes:
        pytest.skip("the family has no such elements")
    operands = case.operands(half, 0)
    function = case.operator(family.fmha if case.queries is not None else family.fna)
    (found,) = gradients(function, operands)
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, operands)
    if family.backend.is_differentiable:
        jax.eval_shape(lambda o: jax.jvp(lambda o: gradients(function, o) and function(o), (o,), (o,)), operands)


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_merges_and_rotations(half: str) -> None:
    tokens = jnp.ones((2, 3, 4, 2, 8), half)
    for dtype in ("float32", half):
        lse = jnp.ones(tokens.shape[:-1], dtype)
        found = gradients(lambda out, lse: natten_jax.merge_attentions([out, out], [lse, lse]), tokens, lse)
        assert [each.dtype for each in found] == [half, dtype]
    angles = rotary_angles((3, 4), head_dim=8)
    for interleaved in (True, False):
        gradients(lambda t, interleaved=interleaved: apply_rotary(t, angles, interleaved=interleaved), tokens)


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@pytest.mark.parametrize("normalize", [True, False])
def test_modules(half: str, normalize: bool) -> None:
    pytest.importorskip("flax")
    from flax import nnx
    from natten_jax.flax_modules import linen as linen_modules
    from natten_jax.flax_modules import nnx as nnx_modules

    inputs = jnp.ones((1, 8, 16), half)
    for param_dtype in ("float32", half):
        options: Any = {"kernel_size": 3, "normalize_qk": normalize, "dtype": half, "param_dtype": param_dtype}
        module = nnx_modules.NeighborhoodAttention1D(16, num_heads=2, rngs=nnx.Rngs(0), **options)
        graph, state = nnx.split(module)
        gradients(lambda state, inputs, graph=graph: nnx.merge(graph, state)(inputs), state, inputs)
        linen = linen_modules.NeighborhoodAttention1D(num_heads=2, **options)
        gradients(linen.apply, linen.init(jax.random.key(0), inputs), inputs)
