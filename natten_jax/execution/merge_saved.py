"""The merge of a forward pass on some keys with that on others, to the digits that backward passes need."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from natten_jax.arrays.operands import Operands, Saved
from natten_jax.arrays.query_box import QueryBox
from natten_jax.arrays.remainders import base2, pack_remainder, unpack_remainder
from natten_jax.native.abi import box_start


def merged(one: Saved, other: Saved) -> Saved:
    """What a forward pass on the keys of both saves.

    Relative to the larger logsumexp, and in base 2, where a logsumexp is that number times ``log2(e)``, rounded, and
    the remainder (:mod:`natten_jax.arrays.remainders`). A query that sees no key has an output of zeros and a logsumexp
    of ``-inf``.
    """
    assert one.remainder is not None and other.remainder is not None
    first, second = base2(one.logsumexp), base2(other.logsumexp)
    parts = unpack_remainder(one.remainder), unpack_remainder(other.remainder)
    highest = jnp.maximum(first, second)
    highest = jnp.where(jnp.isneginf(highest), 0, highest)
    distances = (first - highest) + parts[0][0], (second - highest) + parts[1][0]
    # Remainders of large logits may be large: weights are relative to them as well, so that nothing overflows.
    top = jnp.maximum(*distances)
    top = jnp.where(jnp.isneginf(top), 0, top)
    weights = [jnp.exp2((distance - top) + log2_sum) for distance, (_, log2_sum) in zip(distances, parts, strict=True)]
    total = weights[0] + weights[1]
    log2_total = jnp.log2(total)
    logsumexp = (highest + (top + log2_total)) * np.asarray(math.log(2), total.dtype)
    remainder = jnp.where(total == 0, 0, pack_remainder((highest - base2(logsumexp)) + top, log2_total))
    share = jnp.where(total == 0, 0, weights[1] / total)[..., None]
    out = one.out.astype(total.dtype) * (1 - share) + other.out.astype(total.dtype) * share
    return Saved(out.astype(one.out.dtype), logsumexp, remainder)


def continued(forward_saving: Callable[[Operands], Saved], operands: Operands, saved: Saved, seeing: QueryBox) -> Saved:
    """What is saved of attention to more keys, after a pass on others.

    Args:
        forward_saving: A forward pass.
        operands: The operands of all queries, and of keys that only queries of the box see; with origins.
        saved: What earlier passes saved.
        seeing: The box.
    """
    assert operands.origins is not None
    query = seeing.copied(operands.inputs.query)
    found = forward_saving(Operands(operands.inputs._replace(query=query), with_start_of(seeing, operands.origins)))
    both = merged(jax.tree.map(seeing.cut, saved), found)
    result: Saved = jax.tree.map(seeing.put, saved, both)
    return result


def with_start_of(box: QueryBox, origins: jax.Array) -> jax.Array:
    """Origins of a box of the queries that they are the origins of."""
    start = box_start(box)
    return origins + jnp.stack([start, jnp.zeros_like(start)])
