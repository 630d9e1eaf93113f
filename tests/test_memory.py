"""Peak memory: nothing grows with the number of query and key pairs."""

from __future__ import annotations

import pytest
from families import Family
from programs import output_of, run_python

PROGRAM = """
import resource, sys
import jax, jax.numpy as jnp
import natten_jax

backend = sys.argv[1]
query, key, value, cotangent = (
    jax.random.normal(jax.random.key(i), (1, 256, 256, 1, 32), jnp.float32) for i in range(4)
)
jax.block_until_ready((query, key, value, cotangent))

@jax.jit
def both(query, key, value, cotangent):
    out, pullback = jax.vjp(lambda *a: natten_jax.na2d(*a, kernel_size=7, backend=backend), query, key, value)
    return out, pullback(cotangent)

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
jax.block_until_ready(both(query, key, value, cotangent))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / 1e6)
"""
LARGEST = 400  # MB; the operands, results and gradients together are 64, all logits would be 16384


def test_peak_of_both_passes(family: Family) -> None:
    if family.needs_gpu:
        pytest.skip("this is about the host's memory")
    megabytes = float(output_of(run_python(PROGRAM, family.fna)))
    assert megabytes < LARGEST
