"""The kernels of the backward pass, and how their results become gradients.

A block has three warpgroups: each thread of two owns half a row of logits; of the third, one warp copies tiles, and one
issues products. Blocks take one item after another. Sums go over pairs in an order that is always the same.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from natten_jax.arrays.operands import Cotangents, Gradients, Operands, Saved
from natten_jax.arrays.remainders import LOG2_E, base2_parts
from natten_jax.backends.blackwell.backward.items import Owned, OwnedKeys, OwnedQueries
from natten_jax.backends.blackwell.backward.loads import drain, load_item
from natten_jax.backends.blackwell.backward.memory import HALVES, Memory
from natten_jax.backends.blackwell.backward.products import multiply_item
from natten_jax.backends.blackwell.backward.weights import Tables, Warpgroup
from natten_jax.backends.blackwell.call import ROWS, Call, Scalar, blocks_of, call_of, divided
from natten_jax.backends.blackwell.memory import REGISTERS_OF_OTHERS, REGISTERS_OF_ROWS
from natten_jax.backends.native_backend import delta
from natten_jax.backends.row_statistics import finite_scale
from natten_jax.native.abi import KERNEL_RANK
from natten_jax.plan.plan import Plan

#: Logsumexp in base 2 of queries that see nothing, and of rows that are no queries: their weights are zero.
_NOTHING_SEEN = 1e30
_LOADS, _PRODUCTS = 0, 1  # warps


class _Inputs(NamedTuple):
    """What a kernel reads.

    Attributes:
        arrays: Queries, cotangents of the output, keys and values.
        tables: Tables of boxes, and where keys are owned, of the tiles of queries that see them.
        rows: What is known of queries.
        scales: float32: what gradients of queries, or of keys, are multiplied by in the end, of each of their heads.
    """

    arrays: Sequence[Any]
    tables: Sequence[Any]
    rows: Tables
    scales: Any


def gradients(plan: Plan, operands: Operands, saved: Saved, cotangents: Cotangents) -> Gradients:
    """Compute the gradients of the inputs."""
    call, inputs = call_of(plan, operands), operands.inputs
    arrays = [
        call.queries.laid_out(inputs.query),
        call.queries.laid_out(cotangents.out.astype(inputs.query.dtype)),
        call.keys.laid_out(inputs.key),
        call.keys.laid_out(inputs.value),
    ]
    reference, remainder = base2_parts(saved.logsumexp, saved.remainder)
    logsumexp = jnp.where(saved.logsumexp == -jnp.inf, _NOTHING_SEEN, reference)
    statistics = call.in_items([logsumexp, remainder, delta(saved.out, *cotangents)], _NOTHING_SEEN)
    scale = finite_scale(plan.problem.scale, inputs.scale)
    scale = jnp.broadcast_to(scale, (call.queries.batch, call.queries.heads))
    tables = call.arrays()
    boxes, bounds = tables[:KERNEL_RANK], tables[KERNEL_RANK:]
    rows = Tables(bounds, statistics, scale.reshape(-1) * LOG2_E)
    like = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]

    of_query, *sums = _launched(
        call,
        "natten_jax_blackwell_query_gradient",
        call.items,
        OwnedQueries,
        Warpgroup.query_gradients,
        _Inputs(arrays, boxes, rows, scale.reshape(-1)),
        [like[0]] if inputs.scale is None else [like[0], jax.ShapeDtypeStruct((call.items, HALVES, ROWS), jnp.float32)],
    )
    of_key_heads = scale[:, :: call.group_heads]
    if inputs.scale is not None and call.group_heads > 1:
        factors, of_key_heads = _over_query_heads(call, scale)
        rows = rows._replace(factors=factors.reshape(-1))
    of_key, of_value = _launched(
        call,
        "natten_jax_blackwell_key_gradients",
        call.key_items,
        OwnedKeys,
        Warpgroup.key_gradients,
        _Inputs(arrays, [*boxes, *call.seeing()], rows, of_key_heads.reshape(-1)),
        like[2:],
    )
    rank = plan.problem.rank
    of_scale = None
    if sums:
        of_halves = jnp.stack(call.of_queries(sums[0]))
        of_scale = jnp.sum(of_halves, axis=(0, *range(2, 2 + rank)))
    return Gradients(
        call.queries.restored(of_query, rank),
        call.keys.restored(of_key, rank),
        call.keys.restored(of_value, rank),
        scale=of_scale,
    )


def _over_query_heads(call: Call, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Scales ``[batch, heads]`` as factors of at most 1, and what these are multiplied by, ``[batch, heads_kv]``.

    Gradients of the logits are rounded before they are summed over the query heads of a key head: what they are
    multiplied by before must not make them small.
    """
    groups = scale.reshape(call.keys.batch, call.keys.heads, call.group_heads)
    largest = jnp.max(jnp.abs(groups), axis=-1)
    return groups / jnp.where(largest == 0, 1, largest)[..., None], largest


def _launched(
    call: Call,
    name: str,
    items: int,
    owner: Callable[..., Owned],
    weigh: Callable[..., None],
    inputs: _Inputs,
    results: Sequence[jax.ShapeDtypeStruct],
) -> Sequence[jax.Array]:
    """The results of a kernel.

    Args:
        call: What runs.
        name: Its name.
        items: Its work items.
        owner: What an item owns, of the call, its number, and the tables.
        weigh: What a warpgroup does that owns rows: a method of :class:`Warpgroup`.
        inputs: What it reads.
        results: Shapes and types of the results.
    """
    owns_keys = owner is OwnedKeys
    blocks, items_of_head = blocks_of(items), items // math.prod(inputs.scales.shape)
    leaves, structure = jax.tree.flatten(inputs)

    def kernel(*refs: Any, **scratch: Any) -> None:
        read: _Inputs = jax.tree.unflatten(structure, refs[: len(leaves)])
        written, memory = refs[len(leaves) :], Memory(**scratch)
        block, warpgroup = jax.lax.axis_index("block"), jax.lax.axis_index("warpgroup")
        count = jax.lax.div(items - 1 - block, blocks) + 1

        def for_each_item(body: Callable[[Owned, Scalar, Any], Any], state: Any) -> Any:
            """Carry a state over the items of this block."""

            def visit(index: Scalar, state: Any) -> Any:
                number = block + index * blocks
                return body(owner(call, number, read.tables), number, state)

            return jax.lax.fori_loop(0, count, visit, state)

        def weigh_half(half: int) -> None:
            plgpu.set_max_registers(REGISTERS_OF_ROWS, action="increase")
            own = Warpgroup(call, memory, half, read.rows, written)

            def body(owned: Owned, number: Scalar, none: None) -> None:
                scale = read.scales[divided(number, items_of_head)[0]]
                weigh(own, owned, scale)

            for_each_item(body, None)

        for half in range(HALVES):
            pl.when(warpgroup == half)(functools.partial(weigh_half, half))

        @pl.when(warpgroup == HALVES)
        def _() -> None:
            plgpu.set_max_registers(REGISTERS_OF_OTHERS, action="decrease")

            @plgpu.warp_map
            def _(warp: Scalar) -> None:
                @pl.when(warp == _LOADS)
                def _() -> None:
                    def body(owned: Owned, number: Scalar, state: Any) -> Any:
                        return load_item(call, memory, read.arrays, owned, state, owns_keys=owns_keys)

                    state = for_each_item(body, (jnp.int32(0), jnp.int32(0)))
                    drain(call, memory, state, owns_keys=owns_keys)

                @pl.when(warp == _PRODUCTS)
                def _() -> None:
                    def body(owned: Owned, number: Scalar, before: Scalar) -> Scalar:
                        return multiply_item(call, memory, owned, before, owns_keys=owns_keys)

                    for_each_item(body, jnp.int32(0))

    return plgpu.kernel(
        kernel,
        out_type=list(results),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=HALVES + 1,
        thread_name="warpgroup",
        scratch_types=Memory.types(call, inputs.arrays[0].dtype, owns_keys=owns_keys),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name=name,
    )(*leaves)
