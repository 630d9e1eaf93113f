"""Meshes over the CPU devices of a test process, which has eight devices, and arrays on these meshes."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


def mesh_of(kind: str, **axes: int) -> Mesh:
    """Make a mesh from axis sizes by name, with all axes ``"Auto"`` or all ``"Explicit"``."""
    types = (AxisType[kind],) * len(axes)
    devices = jax.devices()[: math.prod(axes.values())]
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=types, devices=devices)


def put(arrays: Any, mesh: Mesh, *axes: Any) -> Any:
    """Put the arrays of a tree on a mesh. ``axes`` has the mesh axis of each dimension, or ``None``."""
    return jax.device_put(arrays, NamedSharding(mesh, PartitionSpec(*axes)))


def assert_close(found: Any, expected: Any, atol: float = 2e-5, rtol: float = 1e-5, note: str = "") -> None:
    """Check that the arrays of two trees are equal up to tolerances."""
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), atol=atol, rtol=rtol, err_msg=note)
