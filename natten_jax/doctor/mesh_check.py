"""Tries whether an operator is split over a mesh, for each kind of mesh axes that JAX has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from natten_jax.ops.neighborhood import na1d

_SPEC = PartitionSpec("d")
#: Runs an operator on an array whose batch is split over devices.
Run = Callable[[jax.Array, Sequence[jax.Device]], jax.Array]


def _attend(array: jax.Array) -> jax.Array:
    output: jax.Array = na1d(array, array, array, 3)
    return output


def _under(kind: AxisType) -> Run:
    def run(array: jax.Array, devices: Sequence[jax.Device]) -> jax.Array:
        mesh = Mesh(np.asarray(devices), ("d",), axis_types=(kind,))
        with jax.set_mesh(mesh):
            return jax.jit(_attend)(jax.device_put(array, NamedSharding(mesh, _SPEC)))

    return run


def _manual(array: jax.Array, devices: Sequence[jax.Device]) -> jax.Array:
    mesh = Mesh(np.asarray(devices), ("d",), axis_types=(AxisType.Auto,))
    local = jax.shard_map(_attend, mesh=mesh, in_specs=_SPEC, out_specs=_SPEC)
    return jax.jit(local)(jax.device_put(array, NamedSharding(mesh, _SPEC)))


#: By the type of the axes.
MODES: Mapping[str, Run] = {
    "Auto": _under(AxisType.Auto),
    "Explicit": _under(AxisType.Explicit),
    "Manual": _manual,
}


def check(run: Run, devices: Sequence[jax.Device]) -> None:
    """Split a small call over devices.

    Raises:
        ValueError: Each device computes everything, or not what one device does.
        Exception: Whatever keeps the call from running at all.
    """
    array = jnp.asarray(np.random.default_rng(0).standard_normal((len(devices), 8, 1, 8)), jnp.float32)
    found = run(array, devices)
    if found.sharding.shard_shape(found.shape)[0] != 1:
        raise ValueError("every device computes the whole batch")
    if not np.allclose(np.asarray(found), np.asarray(_attend(array)), atol=1e-2):
        raise ValueError("the values are not those of one device")
