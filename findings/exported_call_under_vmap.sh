#!/usr/bin/env bash
# JAX 0.10.2: a restored program maps over an axis in jax.lax.map, but not in jax.vmap, nor in jax.lax.map with batch_size.
#
# `jax.export.deserialize(...).call` has no batching rule. jax.lax.map runs the program once per entry and works. With
# batch_size, which is documented as a trade of memory for speed, the same call raises NotImplementedError, because chunks
# are mapped by vmap. A program that was exported from a function under jax.vmap works.
#
# Seen on x86-64 with Python 3.11.7:
#   0.10.2 vmap: NotImplementedError; map: (3, 4); map with batch_size: NotImplementedError; exported under vmap: (3, 4)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.11}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet jax==0.10.2 jaxlib==0.10.2 numpy==2.2.6 flatbuffers==25.9.23
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.export
import jax.numpy as jnp


def restored(function, shape):
    exported = jax.export.export(jax.jit(function))(jax.ShapeDtypeStruct(shape, jnp.float32))
    return jax.export.deserialize(exported.serialize()).call


def outcome(call):
    try:
        return call().shape
    except NotImplementedError as error:
        return type(error).__name__


x = jnp.ones((3, 4))
call = restored(jnp.tanh, (4,))
found = {
    "vmap": outcome(lambda: jax.vmap(call)(x)),
    "map": outcome(lambda: jax.lax.map(call, x)),
    "map with batch_size": outcome(lambda: jax.lax.map(call, x, batch_size=2)),
    "exported under vmap": outcome(lambda: restored(jax.vmap(jnp.tanh), (3, 4))(x)),
}
print(jax.__version__, "; ".join(f"{name}: {result}" for name, result in found.items()))
assert jax.__version__ == "0.10.2"
assert list(found.values()) == ["NotImplementedError", (3, 4), "NotImplementedError", (3, 4)]
PYTHON
