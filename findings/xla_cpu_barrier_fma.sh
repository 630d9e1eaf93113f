#!/usr/bin/env bash
# JAX 0.10.2 on CPU: jax.lax.optimization_barrier does not keep a product from being fused into the subtraction behind it.
#
# `y - optimization_barrier(x * c)`, where y holds the rounded products, should be zero everywhere. In jax 0.10.2 it is the
# rounding error of x * c, as after a fused multiply-add: every one of 4096 differences is nonzero. Without jit, the product
# is rounded and all differences are zero. In jax 0.12.0.1 the jitted differences are zero, too.
#
# Seen on x86-64 with Python 3.11.7:
#   0.10.2 jit: 4096 of 4096 differences are nonzero; eager: 0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.11}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet jax==0.10.2 jaxlib==0.10.2 numpy==2.2.6
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp
import numpy as np

factor = np.float32(1.4426950408889634)


def difference(x, y):
    return y - jax.lax.optimization_barrier(x * factor)


x = 1e6 * jax.random.normal(jax.random.key(0), (4096,))
y = jnp.asarray(np.asarray(x) * factor)
jitted = int(jnp.count_nonzero(jax.jit(difference)(x, y)))
eager = int(jnp.count_nonzero(difference(x, y)))
print(f"{jax.__version__} jit: {jitted} of {x.size} differences are nonzero; eager: {eager}")
assert jax.__version__ == "0.10.2"
assert jitted == x.size
assert eager == 0
PYTHON
