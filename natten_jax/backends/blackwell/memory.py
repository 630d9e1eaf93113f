"""What the warps of a block share: shared memory, tensor memory, and the barriers between them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from natten_jax.backends.blackwell.call import KEYS, ROWS, Call
from natten_jax.backends.blackwell.layout import Lines

#: Boxes of keys, and of values, that are in shared memory at a time.
STAGES = 2
#: Registers of a thread that owns a row of logits, and of others, of a block of three warpgroups: of 3 x 168.
REGISTERS_OF_ROWS, REGISTERS_OF_OTHERS = 232, 40


@dataclasses.dataclass(frozen=True)
class Memory:
    """References to it; a box of keys ``j`` is in the slot ``j % STAGES``.

    Attributes:
        query: Halves of the tile of queries, ``[halves, blocks, rows, block]``; in the end, of the output.
        key: ``[stages, blocks, keys, block]``.
        value: Likewise.
        logits: For each half, in tensor memory: logits, and in their place the weights that they become.
        mixed: For each half, in tensor memory: the weighted sums of values.
        query_is_in: For each half: its tile has been copied.
        query_is_out: For each half: its place may be overwritten, as the output has left it.
        key_is_in: For each slot: the keys have been copied.
        key_is_out: For each slot: products with its keys are done.
        value_is_in: As of keys.
        value_is_out: As of keys.
        logits_are_in: For each half: logits are there.
        weights_are_in: For each half: weights are there, and the sums so far are multiplied by what they change by.
        weights_are_out: For each half: the product with the weights is done, so that logits may take their place.
        mixed_is_in: For each half: the last product with values is done, if there was any.
    """

    query: Any
    key: Any
    value: Any
    logits: Any
    mixed: Any
    query_is_in: Any
    query_is_out: Any
    key_is_in: Any
    key_is_out: Any
    value_is_in: Any
    value_is_out: Any
    logits_are_in: Any
    weights_are_in: Any
    weights_are_out: Any
    mixed_is_in: Any

    @staticmethod
    def types(call: Call, dtype: Any) -> dict[str, Any]:
        """What to allocate, by attribute."""
        lines, halves = call.queries, call.halves

        def logits() -> Any:
            weights = plgpu.TMEM((ROWS, KEYS), dtype, packed=True)
            return plgpu.RefUnion(plgpu.TMEM((ROWS, KEYS), jnp.float32), weights)

        of_queries, of_keys = (pieces.count * lines.blocks for pieces in (call.query_pieces, call.key_pieces))
        return {
            "query": tiles(lines, halves, ROWS, dtype),
            "key": tiles(lines, STAGES, KEYS, dtype),
            "value": tiles(lines, STAGES, KEYS, dtype),
            "logits": [logits() for _ in range(halves)],
            "mixed": [plgpu.TMEM((ROWS, lines.blocks * lines.block), jnp.float32) for _ in range(halves)],
            "query_is_in": barriers(halves, of_queries),
            "query_is_out": barriers(halves),
            "key_is_in": barriers(STAGES, of_keys),
            "key_is_out": barriers(STAGES, of_products=True),
            "value_is_in": barriers(STAGES, of_keys),
            "value_is_out": barriers(STAGES, of_products=True),
            "logits_are_in": barriers(halves, of_products=True),
            "weights_are_in": barriers(halves, of_products=True),
            "weights_are_out": barriers(halves, of_products=True),
            "mixed_is_in": barriers(halves, of_products=True),
        }


def tiles(lines: Lines, count: int, tokens: int, dtype: Any) -> Any:
    """Places for tiles of tokens, ``[count, blocks, tokens, block]``."""
    layout = plgpu.TilingTransform((8, lines.block)), plgpu.SwizzleTransform(lines.block * jnp.dtype(dtype).itemsize)
    return plgpu.SMEM((count, lines.blocks, tokens, lines.block), dtype, transforms=layout)


def barriers(count: int, arrivals: int = 1, *, of_products: bool = False) -> Any:
    """Barriers, each of so many arrivals in a phase."""
    return plgpu.Barrier(num_arrivals=arrivals, num_barriers=count, orders_tensor_core=of_products)


def slot_of(box: Any) -> Any:
    """The slot of a box of keys, which are counted over all items of a block."""
    return jax.lax.rem(box, STAGES)


def wait(barrier: Any) -> None:
    """Wait for the next phase of a barrier."""
    plgpu.barrier_wait(barrier)


def wait_if(condition: Any, barrier: Any) -> None:
    """Wait where a condition holds."""
    pl.when(condition)(lambda: wait(barrier))
