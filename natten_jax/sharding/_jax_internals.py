"""Wrappers around undocumented parts of JAX that can change in any release.

``tests/sharding/test_jax_internals.py`` specifies the behaviour of each function.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax._src import ad_checkpoint, custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxlib.mlir import ir

#: The primitive that ``jax.ad_checkpoint.checkpoint_name`` binds.
CHECKPOINT_NAME: Primitive = ad_checkpoint.name_p


def platforms_of(ctx: mlir.LoweringRuleContext) -> Sequence[str]:
    return ctx.module_context.platforms


def is_exported(ctx: mlir.LoweringRuleContext) -> bool:
    return bool(ctx.module_context.lowering_parameters.for_export)


def device_numbers(ctx: mlir.LoweringRuleContext) -> np.ndarray | None:
    """Return the device numbers of a program, with a row for each position along the manual mesh axes.

    Returns:
        ``[positions, devices per position]``. ``None`` if XLA's partitioner does not process the program.
    """
    context = ctx.module_context.axis_context
    if isinstance(context, mlir.ShardingContext):
        return np.arange(context.num_devices)[None]
    if not isinstance(context, mlir.SPMDAxisContext):
        return None
    names = context.mesh.axis_names
    numbers = np.arange(context.mesh.size).reshape(tuple(context.mesh.shape.values()))
    manual = [axis for axis, name in enumerate(names) if name in context.manual_axes]
    automatic = [axis for axis, name in enumerate(names) if name not in context.manual_axes]
    rows = math.prod(numbers.shape[axis] for axis in manual)
    return numbers.transpose(*manual, *automatic).reshape(rows, -1)


def with_numbered_devices(ctx: mlir.LoweringRuleContext, count: int) -> mlir.LoweringRuleContext:
    """Replace the devices in ``ctx`` by integers, so that ``custom_partitioning`` can be lowered without devices.

    JAX lowers ``custom_partitioning`` only if ``ctx`` contains the devices of the program. A program over an
    ``AbstractMesh`` has no devices. Integers suffice, because JAX only puts the devices into the shardings that the
    partitioner's callback receives.
    """
    numbered: Any = tuple(range(count))
    context = ctx.module_context.replace(axis_context=mlir.ShardingContext(count, numbered))
    return ctx.replace(module_context=context)


def name_partitioner_callback(call: Any, name: str) -> None:
    """Rename the partitioner callback of a custom call to ``name``.

    JAX names the callback by its address in memory, which differs between processes.
    """
    callbacks = custom_partitioning._sharding_callbacks
    address = ir.StringAttr(call.attributes["backend_config"]).value
    callbacks[name.encode()] = callbacks[address.encode()]
    call.attributes["backend_config"] = ir.StringAttr.get(name)


def devices_of(sharding: jax.sharding.Sharding) -> Sequence[jax.Device]:
    """Return the devices of a sharding that the partitioner's callback receives, in the program's order."""
    devices: Sequence[jax.Device] = sharding._device_assignment
    return devices


def hlo_sharding_of(sharding: jax.sharding.Sharding, ndim: int) -> Any:
    """Convert a sharding to XLA's ``HloSharding`` for arrays of ``ndim`` dimensions."""
    return sharding._to_xla_hlo_sharding(ndim)


def sharding_of(hlo: Any, like: jax.sharding.Sharding) -> jax.sharding.Sharding:
    """Convert an ``HloSharding`` to a sharding with the class and the devices of ``like``."""
    kind: Any = type(like)
    result: jax.sharding.Sharding = kind(devices_of(like), hlo)
    return result
