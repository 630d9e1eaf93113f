#!/usr/bin/env bash
# JAX 0.10.2 on CPU: jax.nn.dot_product_attention answers a query without keys in two ways.
#
# If `mask` hides every key, the output is the mean of all values, hidden ones included: logits are replaced by a large
# negative number. If a `bias` of -inf hides every key, the output is NaN. Rows of padding therefore change from finite
# numbers to NaN when a mask is written as a bias.
#
# Seen on x86-64 with Python 3.11.7, values 0, 1, 2, 3:
#   jax 0.10.2 mask: 1.5; bias of -inf: nan
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.11}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet jax==0.10.2 jaxlib==0.10.2 numpy==2.2.6
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp

query, key = jnp.ones((1, 1, 1, 4)), jnp.ones((1, 4, 1, 4))
value = jnp.broadcast_to(jnp.arange(4.0)[None, :, None, None], (1, 4, 1, 4))
attend = jax.nn.dot_product_attention
masked = float(attend(query, key, value, mask=jnp.zeros((1, 1, 1, 4), bool)).max())
biased = float(attend(query, key, value, bias=jnp.full((1, 1, 1, 4), -jnp.inf)).max())
print(f"jax {jax.__version__} mask: {masked}; bias of -inf: {biased}")
assert jax.__version__ == "0.10.2"
assert masked == 1.5
assert biased != biased
PYTHON
