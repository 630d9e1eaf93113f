"""Kernels on one part of a layout, such as a device's shard. The origins of queries and keys are operands."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from natten_jax.arrays.operands import Cotangents, Inputs, Operands
from natten_jax.problem import problem_of
from tests.support.families import Family
from tests.support.plans import plans_of


@pytest.mark.parametrize("keys", [(4, 5), (3, 6)])
@pytest.mark.parametrize("additional", [0, 3])
def test_dilation_groups_without_a_key(native_family: Family, keys: tuple[int, int], additional: int) -> None:
    """Test parts of the layout in which some or all queries find no key of their dilation group."""
    first, end = keys
    dtype = native_family.dtype
    problem = problem_of(
        (10,), 2, dilation=5, heads=2, heads_kv=1, head_dim=16, dtype=dtype, scale=0.25, additional_kv=additional
    )
    backend, plans = plans_of(native_family.fna, problem)
    rng = np.random.default_rng(0)

    def array(tokens: int, heads: int) -> jnp.ndarray:
        return jnp.asarray(rng.standard_normal((1, tokens, heads, 16)), dtype)

    more_keys, more_values = (array(additional, 1), array(additional, 1)) if additional else (None, None)
    origins = jnp.array([[0, 0, 0], [0, 0, first]], jnp.int32)
    key, value = array(end - first, 1), array(end - first, 1)
    operands = Operands(Inputs(array(4, 2), key, value, more_keys, more_values), origins)
    saved = backend.forward(plans["forward"], operands, saves=True)
    cotangent = array(4, 2)
    cotangents = Cotangents(cotangent, jnp.zeros((1, 4, 2), jnp.float32))
    gradients = backend.backward(plans["backward"], operands, saved, cotangents)

    # Query 0 sees keys 0 and 5, query 1 sees keys 1 and 6, and so on, as far as the part contains these keys.
    is_seen = np.array([[first <= key < end and key % 5 == query for key in range(first, end)] for query in range(4)])
    has_keys = is_seen.any(1) | (additional > 0)
    lse = np.asarray(saved.logsumexp)[0]
    assert np.isfinite(lse[has_keys]).all()
    assert (lse[~has_keys] == -np.inf).all()
    assert (np.asarray(saved.out, np.float32)[0][~has_keys] == 0).all()
    for gradient in filter(lambda each: each is not None, gradients):
        assert np.isfinite(np.asarray(gradient, np.float32)).all()
    assert (np.asarray(gradients.query, np.float32)[0][~has_keys] == 0).all()
    assert (np.asarray(gradients.value, np.float32)[0][~is_seen.any(0)] == 0).all()
