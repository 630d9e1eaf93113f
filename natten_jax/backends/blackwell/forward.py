"""The forward pass: a block for each work item, or blocks that take one after another.

Two halves of a tile of 256 queries are in flight at a time, or one of 128. A warpgroup for each makes weights of its
logits; one warp of another warpgroup copies tiles, and one issues products, so that the matrix units work on one half
while the other's weights are worked out.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from natten_jax.arrays.remainders import LOG2_E
from natten_jax.backends.blackwell.call import ROWS, Call, Scalar, blocks_of
from natten_jax.backends.blackwell.loads import drain, load_item
from natten_jax.backends.blackwell.memory import REGISTERS_OF_OTHERS, REGISTERS_OF_ROWS, Memory
from natten_jax.backends.blackwell.products import multiply_item
from natten_jax.backends.blackwell.softmax import weigh_item
from natten_jax.native.abi import KERNEL_RANK

_LOADS, _PRODUCTS = 0, 1  # warps


def forward(
    call: Call, query: jax.Array, key: jax.Array, value: jax.Array, scale: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Compute the output, and the softmax's maxima and sums.

    Args:
        call: What runs.
        query: As ``call.queries`` has it.
        key: As ``call.keys`` has it.
        value: Likewise.
        scale: float32 ``[batch * heads]``: factors of the logits.

    Returns:
        The output, laid out as the query; maxima of the logits in base 2 and sums of the weights,
        ``[items, 2, tokens]``.
    """
    is_persistent = call.plan.performance.run_persistent_kernel
    blocks = blocks_of(call.items) if is_persistent else call.items
    tables = call.arrays()
    results = [
        jax.ShapeDtypeStruct(query.shape, query.dtype),
        jax.ShapeDtypeStruct((call.items, 2, call.halves * ROWS), jnp.float32),
    ]

    def kernel(*refs: Any, **scratch: Any) -> None:
        arrays, scales, tables, bounds, results = refs[:3], refs[3], refs[4:7], refs[7:10], refs[10:]
        memory = Memory(**scratch)
        block, warpgroup = jax.lax.axis_index("block"), jax.lax.axis_index("warpgroup")
        count = jax.lax.div(call.items - 1 - block, blocks) + 1

        def for_each_item(body: Any, state: Any) -> Any:
            """Carry a state over the items of this block."""
            return jax.lax.fori_loop(0, count, lambda i, state: body(block + i * blocks, state), state)

        def weigh(half: int) -> None:
            if call.halves > 1:
                plgpu.set_max_registers(REGISTERS_OF_ROWS, action="increase")

            def body(number: Scalar, none: None) -> None:
                weigh_item(call, memory, half, tables, bounds, scales, results, number)

            for_each_item(body, None)

        for half in range(call.halves):
            pl.when(warpgroup == half)(functools.partial(weigh, half))

        @pl.when(warpgroup == call.halves)
        def _() -> None:
            if call.halves > 1:
                plgpu.set_max_registers(REGISTERS_OF_OTHERS, action="decrease")

            @plgpu.warp_map
            def _(warp: Scalar) -> None:
                @pl.when(warp == _LOADS)
                def _() -> None:
                    def body(number: Scalar, state: Any) -> Any:
                        return load_item(call, memory, arrays, tables, number, state)

                    drain(call, memory, for_each_item(body, (jnp.int32(0), jnp.int32(0))))

                @pl.when(warp == _PRODUCTS)
                def _() -> None:
                    def body(number: Scalar, before: Scalar) -> Scalar:
                        return multiply_item(call, memory, tables, number, before)

                    for_each_item(body, jnp.int32(0))

    assert len(tables) == 2 * KERNEL_RANK
    out, statistics = plgpu.kernel(
        kernel,
        out_type=results,
        grid=(blocks,),
        grid_names=("block",),
        num_threads=call.halves + 1,
        thread_name="warpgroup",
        scratch_types=Memory.types(call, query.dtype),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="natten_jax_blackwell_forward",
    )(query, key, value, scale * LOG2_E, *tables)
    return out, statistics
