"""A relative bias that all batch entries share, for kernels that read one of each."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from natten_jax.arrays.operands import Inputs


def table_of_each_entry(inputs: Inputs) -> jax.Array:
    """The relative bias, ``[batch, heads, entries]``."""
    table = inputs.relative_bias
    assert table is not None
    return jnp.broadcast_to(table, (inputs.query.shape[0], *table.shape[1:]))


def gradient_of_shared_table(of_entries: jax.Array, table: jax.Array) -> jax.Array:
    """The gradient of a table ``[1 or batch, heads, entries]``, from those of batch entries."""
    return jnp.sum(of_entries, axis=0, keepdims=True) if table.shape[0] == 1 else of_entries
