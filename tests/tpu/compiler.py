"""Compile for TPUs on a machine without a TPU: libtpu compiles for the description of a chip."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding

from tests.support import oracle
from tests.support.problems import Case

#: By chip: the name of the smallest topology with this chip, and the name of the device kind in JAX.
CHIPS: Mapping[str, tuple[str, str]] = {
    "v4": ("v4:2x2x1", "TPU v4"),
    "v5e": ("v5e:2x2", "TPU v5 lite"),
    "v5p": ("v5p:2x2x1", "TPU v5"),
    "v6e": ("v6e:2x2", "TPU v6 lite"),
}


@functools.cache
def devices_of(chip: str) -> Sequence[jax.Device]:
    """Return the devices of the smallest topology with the chip."""
    from jax.experimental import topologies

    return topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip][0]).devices


def compiled_for(chip: str, function: Callable[..., Any], *arguments: Any) -> jax.stages.Compiled:
    """Compile a function for a chip.

    Args:
        chip: A key of :data:`CHIPS`.
        function: The function to compile.
        arguments: Shapes of the function's arguments.
    """
    sharding = SingleDeviceSharding(devices_of(chip)[0])
    arguments = jax.tree.map(lambda each: jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=sharding), arguments)
    device = AbstractDevice(device_kind=CHIPS[chip][1], num_cores=1, platform="tpu")
    # Pallas reads the chip from the mesh, because it lowers some operations differently for different chips.
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("tpu",))
    return lowered.compile()


def shapes_of(case: Case, dtype: str) -> tuple[oracle.Tensors, tuple[Any, Any]]:
    """Return the shapes and element types of a problem's operands and cotangents."""

    def array(tokens: tuple[int, ...], heads: int, width: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((case.batch, *tokens, heads, width), jnp.dtype(dtype))

    queries, widths = case.query_layout, (case.head_dim, case.head_dim_v or case.head_dim)
    key, value = (array(case.layout, case.heads_kv, width) for width in widths)
    added = (case.additional,) if case.additional else None
    keys, values = (None if added is None else array(added, case.heads_kv, width) for width in widths)
    operands = oracle.Tensors(
        array(queries, case.heads, widths[0]),
        key,
        value,
        keys,
        values,
        None if case.scales is None else jax.ShapeDtypeStruct((len(case.scales),), jnp.float32),
    )
    logsumexp = jax.ShapeDtypeStruct((case.batch, *queries, case.heads), jnp.float32)
    return operands, (array(queries, case.heads, widths[1]), logsumexp)


def both_passes(case: Case, backend: str) -> Callable[..., Any]:
    """Return a function that computes output, logsumexp and gradients of a problem."""

    def run(operands: oracle.Tensors, cotangents: tuple[Any, Any]) -> Any:
        outputs, pullback = jax.vjp(case.operator(backend), operands)
        return outputs, pullback(cotangents)

    return run
