"""Splits a call over the mesh axes that the types of its arrays name (``AxisType.Explicit``).

Types say which axes split batch and heads: each device gets its part through ``jax.shard_map``. Without such axes the
call runs as it is, inside ``jax.shard_map``, too.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from natten_jax.arguments.token_axes import axis_names
from natten_jax.arrays.avals import vary_alike
from natten_jax.arrays.operands import Inputs, Operands, Output
from natten_jax.arrays.roles import Role, roles_of, roles_of_fields
from natten_jax.plan.request import Request
from natten_jax.sharding.auto import warn_of_gather
from natten_jax.sharding.heads import HeadSplit

Run = Callable[[Request, Operands], Output]
_Axes = tuple[str, ...]


def over_explicit_axes(run: Run, request: Request, operands: Operands) -> Output:
    """Run a call whose arrays may be split over explicit mesh axes."""
    mesh = _mesh_of(operands)
    if mesh is None:
        return run(request, vary_alike(operands))
    leaves, structure = jax.tree.flatten(operands)
    roles = roles_of(operands)
    query, key, *_ = leaves
    batch, *tokens, heads_q = _split_axes(operands.inputs)
    count = math.prod(mesh.shape[name] for name in heads_q)
    is_kv_split = axis_names(_spec(key)[-2]) == heads_q
    heads_kv = heads_q if is_kv_split else ()
    token_axes = tuple(tokens) if any(tokens) else ()
    split = HeadSplit.of(query.shape[-2], key.shape[-2], count, count if is_kv_split else 1)

    def spec(role: Role, ndim: int) -> PartitionSpec:
        if role is Role.WHOLE:
            return PartitionSpec()
        if role is Role.PER_ENTRY:
            return PartitionSpec(batch or None)
        layout = tokens if role.has_layout else [()] * (ndim + role.heads_axis - 1)
        heads = heads_kv if role.is_key_value else heads_q
        trailing = [()] * (-role.heads_axis - 1)
        return PartitionSpec(*(names or None for names in (batch, *layout, heads, *trailing)))

    def run_part(parts: list[jax.Array]) -> Output:
        leaves = vary_alike(parts)
        if not split.takes:
            return run_local(*leaves)
        part = jax.lax.axis_index(heads_q)
        return Output(*split.run_on_taken(run_local, leaves, roles, [Role.QUERY, Role.PER_QUERY], part))

    def run_local(*leaves: jax.Array) -> Any:
        query, key, *_ = leaves
        local = request.of_part(query.shape[0], query.shape[-2], key.shape[-2])
        local = dataclasses.replace(local, token_axes=token_axes) if token_axes else local
        return run(local, jax.tree.unflatten(structure, leaves))

    specs = [spec(role, array.ndim) for role, array in zip(roles, leaves, strict=True)]
    placed = [jax.sharding.reshard(array, NamedSharding(mesh, each)) for array, each in zip(leaves, specs, strict=True)]
    ndim = query.ndim
    out_specs = Output._make([spec(Role.QUERY, ndim), spec(Role.PER_QUERY, ndim - 1)])
    explicit = _explicit_axes(mesh)
    result: Output = jax.shard_map(
        run_part,
        mesh=mesh,
        in_specs=(specs,),
        out_specs=out_specs,
        axis_names=set() if len(explicit) == len(mesh.axis_names) else explicit,
    )(placed)
    return result


@functools.partial(jax.jit, static_argnums=1)
def _placed(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    return jax.sharding.reshard(array, sharding)


def with_whole_dimensions(inputs: Inputs, *, keeps_tokens: bool) -> Inputs:
    """The inputs, gathered where explicit mesh axes split ``head_dim``; with a warning.

    Args:
        inputs: Of a call.
        keeps_tokens: Whether token dimensions can stay split. If not, they are gathered likewise.
    """
    mesh = _mesh_of(inputs)
    if mesh is None:
        return inputs
    arrays: list[jax.Array | None] = []
    for name, role, array in zip(Inputs._fields, roles_of_fields(Inputs), inputs, strict=True):
        if array is None or role is Role.PER_HEAD:
            arrays.append(array)
            continue
        axes = list(_spec(array))
        for axis in [array.ndim - 1] if keeps_tokens else [*range(1, array.ndim - 2), array.ndim - 1]:
            if axes[axis] is not None:
                warn_of_gather(name, axis, array.ndim, f"mesh axes {axis_names(axes[axis])}")
                axes[axis] = None
        is_whole = axes == list(_spec(array))
        arrays.append(array if is_whole else _placed(array, NamedSharding(mesh, PartitionSpec(*axes))))
    return Inputs._make(arrays)


def replicated(array: jax.Array) -> jax.Array:
    """The array, on every device as a whole where explicit mesh axes split it: for a few numbers."""
    mesh = _mesh_of(array)
    return array if mesh is None else _placed(array, NamedSharding(mesh, PartitionSpec()))


def split_like(array: jax.Array, other: jax.Array) -> jax.Array:
    """The array, whose dimensions are 1 or those of another one, split over explicit mesh axes as that is."""
    mesh = _mesh_of(other)
    if mesh is None:
        return array
    axes = [None if n == 1 else axis for n, axis in zip(array.shape, _spec(other), strict=False)]
    return _placed(array, NamedSharding(mesh, PartitionSpec(*axes)))


def reshaped(array: jax.Array, shape: Sequence[Any], sources: Sequence[int | None]) -> jax.Array:
    """The array in another shape, whose dimensions are split over explicit mesh axes as those that they come from.

    Args:
        array: The array.
        shape: Its new shape.
        sources: For each new dimension the old one that its outermost part is; ``None`` for what is split off behind.
    """
    mesh = _mesh_of(array)
    if mesh is None:
        return array.reshape(shape)
    spec = _spec(array)
    sharding = NamedSharding(mesh, PartitionSpec(*(None if source is None else spec[source] for source in sources)))
    result: jax.Array = jax.lax.reshape(array, shape, out_sharding=sharding)
    return result


def _mesh_of(arrays: Any) -> Any:
    """The mesh of the arrays, where it has explicit axes that split anything."""
    for array in jax.tree.leaves(arrays):
        mesh = jax.typeof(array).sharding.mesh
        if any(mesh.shape[name] > 1 for name in _explicit_axes(mesh)):
            return mesh
    return None


def _explicit_axes(mesh: Any) -> set[str]:
    return {name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind is AxisType.Explicit}


def _spec(array: jax.Array) -> tuple[Any, ...]:
    spec = tuple(jax.typeof(array).sharding.spec)
    return spec + (None,) * (array.ndim - len(spec))


def _split_axes(inputs: Inputs) -> list[_Axes]:
    """The mesh axes that split batch, tokens and heads: the query's, or else the next array's."""
    specs = [_spec(array)[:-1] for array in (inputs.query, inputs.key, inputs.value)]
    axes: list[_Axes] = [axis_names(entry) for entry in specs[0]]
    for spec in specs[1:]:
        for i, entry in enumerate(spec):
            others = {name for own in axes for name in own}
            axes[i] = axes[i] or tuple(name for name in axis_names(entry) if name not in others)
    return axes
