"""What the warps of a block of the backward pass share: shared memory, tensor memory, and the barriers between them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from natten_jax.backends.blackwell.call import KEYS, ROWS, Call
from natten_jax.backends.blackwell.memory import barriers, tiles

#: Warpgroups that share a matrix of logits, a half of its columns each.
HALVES = 2


@dataclasses.dataclass(frozen=True)
class Memory:
    """References to it. Of queries and of keys one kind is owned, in one slot; pairs bring others to the other's slots.

    Attributes:
        query: ``[slots, blocks, rows, block]``.
        out_gradient: Cotangents of the output, likewise.
        key: ``[slots, blocks, keys, block]``.
        value: Likewise.
        logits: In tensor memory.
        products: In tensor memory: products of the output's cotangents with values.
        gradients: Those of the logits, rounded: in tensor memory where queries are owned, or in shared memory.
        weights: In shared memory, where keys are owned.
        sums: In tensor memory: gradients of what is owned; of keys, and of values.
        owned_is_in: The tiles that are owned have been copied.
        owned_is_out: Their place may be overwritten, as the results have left it.
        other_is_in: For each slot: the others have been copied.
        other_is_out: For each slot: products with them are done.
        logits_are_in: Logits and products are there.
        gradients_are_in: Gradients, and weights, are there; logits and products are read.
        gradients_are_out: The products with them are done, so that others may take their place.
        sums_are_in: The last product is done, if there was any.
    """

    query: Any
    out_gradient: Any
    key: Any
    value: Any
    logits: Any
    products: Any
    gradients: Any
    sums: Any
    owned_is_in: Any
    owned_is_out: Any
    other_is_in: Any
    other_is_out: Any
    logits_are_in: Any
    gradients_are_in: Any
    gradients_are_out: Any
    sums_are_in: Any
    weights: Any = None

    @staticmethod
    def types(call: Call, dtype: Any, *, owns_keys: bool) -> dict[str, Any]:
        """What to allocate, by attribute."""
        lines, slots = call.queries, slots_of(call, owns_keys=owns_keys)
        width = lines.blocks * lines.block
        of_queries, of_keys = (2 * pieces.count * lines.blocks for pieces in (call.query_pieces, call.key_pieces))
        query_slots, key_slots = (slots, 1) if owns_keys else (1, slots)
        copies = (of_keys, of_queries) if owns_keys else (of_queries, of_keys)
        matrix = plgpu.TMEM((ROWS, KEYS), jnp.float32)
        types = {
            "query": tiles(lines, query_slots, ROWS, dtype),
            "out_gradient": tiles(lines, query_slots, ROWS, dtype),
            "key": tiles(lines, key_slots, KEYS, dtype),
            "value": tiles(lines, key_slots, KEYS, dtype),
            "logits": matrix,
            "products": matrix,
            "sums": [plgpu.TMEM((ROWS, width), jnp.float32) for _ in range(2 if owns_keys else 1)],
            "owned_is_in": barriers(1, copies[0]),
            "owned_is_out": barriers(1, HALVES),
            "other_is_in": barriers(slots, copies[1]),
            "other_is_out": barriers(slots, of_products=True),
            "logits_are_in": barriers(1, of_products=True),
            "gradients_are_in": barriers(1, HALVES, of_products=True),
            "gradients_are_out": barriers(1, of_products=True),
            "sums_are_in": barriers(1, of_products=True),
        }
        if not owns_keys:
            return {**types, "gradients": plgpu.TMEM((ROWS, KEYS), dtype, packed=True)}
        layout = plgpu.TilingTransform((8, TRANSPOSED)), plgpu.SwizzleTransform(TRANSPOSED * jnp.dtype(dtype).itemsize)
        shared = plgpu.SMEM((ROWS, KEYS), dtype, transforms=layout)
        return {**types, "gradients": shared, "weights": shared}


#: Columns of a tile of what the matrix units transpose.
TRANSPOSED = 64
#: Most elements of a head whose tiles of queries and cotangents have two slots beside keys, values, and two matrices.
_WIDEST_OF_TWO = 64


def slots_of(call: Call, *, owns_keys: bool) -> int:
    """How many tiles of what is not owned are in shared memory at a time."""
    return 1 if owns_keys and call.queries.width > _WIDEST_OF_TWO else 2


def slot_of(call: Call, number: Any, *, owns_keys: bool) -> Any:
    """The slot of what a pair brings; pairs are counted over all items of a block."""
    return jax.lax.rem(number, slots_of(call, owns_keys=owns_keys))
