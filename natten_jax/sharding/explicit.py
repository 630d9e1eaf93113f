"""Split a call over the explicit mesh axes (``AxisType.Explicit``) in the types of its arrays.

The shardings in the types determine which axes split the batch, the tokens and the heads. ``jax.shard_map`` passes each
device its part of the arrays. If the types contain no explicit axes, the call runs unchanged, also inside
``jax.shard_map``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from natten_jax.arguments.arrays import axis_names
from natten_jax.arrays.operands import Inputs, Operands, Output, Role, roles_of, roles_of_fields, vary_alike
from natten_jax.plan.plan import Request
from natten_jax.sharding.auto import HeadSplit, warn_of_gather

Run = Callable[[Request, Operands], Output]
_Axes = tuple[str, ...]


def over_explicit_axes(run: Run, request: Request, operands: Operands) -> Output:
    """Run a call whose arrays are split over explicit mesh axes."""
    mesh = mesh_of(operands)
    leaves, structure = jax.tree.flatten(operands)
    roles = roles_of(operands)
    query, key, *_ = leaves
    axes = _SplitAxes.from_inputs(operands.inputs)
    spec = axes.spec
    count = math.prod(mesh.shape[name] for name in axes.heads)
    token_axes = tuple(axes.tokens) if any(axes.tokens) else ()
    split = HeadSplit.for_parts(query.shape[-2], key.shape[-2], count, count if axes.are_heads_kv_split else 1)

    def run_part(parts: list[jax.Array]) -> Output:
        leaves = vary_alike(parts)
        if not split.reads_subset:
            return run_local(*leaves)
        part = jax.lax.axis_index(axes.heads)
        return Output(*split.run_on_subset(run_local, leaves, roles, [Role.QUERY, Role.PER_QUERY], part))

    def run_local(*leaves: jax.Array) -> Any:
        query, key, *_ = leaves
        local = request.for_part(query.shape[0], query.shape[-2], key.shape[-2])
        local = dataclasses.replace(local, token_axes=token_axes) if token_axes else local
        return run(local, jax.tree.unflatten(structure, leaves))

    specs = [spec(role, array.ndim) for role, array in zip(roles, leaves, strict=True)]
    placed = [jax.sharding.reshard(array, NamedSharding(mesh, each)) for array, each in zip(leaves, specs, strict=True)]
    ndim = query.ndim
    out_specs = Output._make([spec(Role.QUERY, ndim), spec(Role.PER_QUERY, ndim - 1)])
    explicit = _explicit_axes(mesh)
    is_nested = AxisType.Manual in mesh.axis_types
    # JAX also shards the residuals of a nested shard_map over the manual axes of the outer shard_map, and then cannot
    # lower the gradient. Checkpoints avoid this, because their only residuals are their arguments.
    run_nested = jax.checkpoint(run_part) if is_nested else run_part
    names = set() if len(explicit) == len(mesh.axis_names) else explicit
    sharded = jax.shard_map(run_nested, mesh=mesh, in_specs=(specs,), out_specs=out_specs, axis_names=names)
    result: Output = (jax.checkpoint(sharded) if is_nested else sharded)(placed)
    return result


@functools.partial(jax.jit, static_argnums=1)
def _placed(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    return jax.sharding.reshard(array, sharding)


def with_whole_dimensions(inputs: Inputs, *, keeps_tokens: bool) -> Inputs:
    """Gather each input dimension that cannot stay split over explicit mesh axes, and warn about it.

    Args:
        inputs: The inputs of a call.
        keeps_tokens: True if only ``head_dim`` is gathered. False if token dimensions are also gathered.
    """
    mesh = mesh_of(inputs)
    if mesh is None:
        return inputs
    arrays: list[jax.Array | None] = []
    for name, role, array in zip(Inputs._fields, roles_of_fields(Inputs), inputs, strict=True):
        if array is None or role.is_of_heads:
            arrays.append(array)
            continue
        axes = list(_spec(array))
        tokens = range(1, array.ndim + role.heads_axis)
        behind_heads = range(array.ndim + role.heads_axis + 1, array.ndim)
        for axis in behind_heads if keeps_tokens else [*tokens, *behind_heads]:
            if axes[axis] is not None:
                warn_of_gather(name, axis, array.ndim, f"mesh axes {axis_names(axes[axis])}")
                axes[axis] = None
        is_whole = axes == list(_spec(array))
        arrays.append(array if is_whole else _placed(array, NamedSharding(mesh, PartitionSpec(*axes))))
    return Inputs._make(arrays)


def replicated(array: jax.Array) -> jax.Array:
    """Replicate a small array over the explicit mesh axes that split it."""
    mesh = mesh_of(array)
    return array if mesh is None else _placed(array, NamedSharding(mesh, PartitionSpec()))


def split_like(array: jax.Array, other: jax.Array) -> jax.Array:
    """Split the dimensions of an array over the same explicit mesh axes as the dimensions of ``other``.

    Each dimension of the array has the extent of the same dimension of ``other``, or extent 1. Dimensions of extent 1
    are not split.
    """
    mesh = mesh_of(other)
    if mesh is None:
        return array
    axes = [None if n == 1 else axis for n, axis in zip(array.shape, _spec(other), strict=False)]
    return _placed(array, NamedSharding(mesh, PartitionSpec(*axes)))


def reshaped(array: jax.Array, shape: Sequence[Any], sources: Sequence[int | None]) -> jax.Array:
    """Reshape an array so that its new dimensions stay split over explicit mesh axes.

    Args:
        array: The array.
        shape: New shape of the array.
        sources: For each new dimension, the index of the old dimension whose mesh axes it keeps. The new dimension must
            be the outermost factor of this old dimension. ``None`` for inner factors, which are not split.
    """
    mesh = mesh_of(array)
    if mesh is None:
        return array.reshape(shape)
    spec = _spec(array)
    sharding = NamedSharding(mesh, PartitionSpec(*(None if source is None else spec[source] for source in sources)))
    result: jax.Array = jax.lax.reshape(array, shape, out_sharding=sharding)
    return result


def split_as(array: jax.Array, inputs: Inputs, role: Role) -> jax.Array:
    """Split an array over explicit mesh axes like an input with the role ``role``.

    JAX then sums the gradient of the array over devices, and does not gather it.
    """
    mesh = mesh_of(inputs)
    if mesh is None:
        return array
    return _placed(array, NamedSharding(mesh, _SplitAxes.from_inputs(inputs).spec(role, array.ndim)))


def run_with_auto_axes(
    function: Callable[..., jax.Array], like: jax.Array, *arrays: Any, inside_manual: bool = True
) -> jax.Array:
    """Call ``function`` with the arrays; XLA chooses how explicit mesh axes split the intermediate results.

    Args:
        function: The function.
        like: Array whose sharding the result gets. The last dimension of the result is not split.
        *arrays: Arguments of the function, which must not use other arrays.
        inside_manual: True if XLA also chooses inside ``jax.shard_map``. False if the function runs unchanged there:
            JAX cannot differentiate some functions if XLA chooses inside ``jax.shard_map``.
    """
    mesh = mesh_of((like, arrays))
    if mesh is None:
        return function(*arrays)
    is_nested = AxisType.Manual in mesh.axis_types  # gradients then need checkpoints, as in `over_explicit_axes`
    if is_nested and not inside_manual:
        return function(*arrays)
    sharding = NamedSharding(mesh, PartitionSpec(*_spec(like)[:-1], None))
    inner = jax.checkpoint(function) if is_nested else function
    run = jax.sharding.auto_axes(inner, axes=tuple(sorted(_explicit_axes(mesh))), out_sharding=sharding)
    result: jax.Array = (jax.checkpoint(run) if is_nested else run)(*arrays)
    return result


def map_sequentially(function: Callable[[Any], Any], arrays: Sequence[jax.Array]) -> Any:
    """Apply ``jax.lax.map`` over the leading axes of arrays.

    If explicit mesh axes split a leading axis, each device maps over its own part.
    """
    names = next((each for each in (axis_names(_spec(array)[0]) for array in arrays) if each), ())
    run = functools.partial(jax.lax.map, function)
    if not names:
        return run(arrays)
    mesh, spec = mesh_of(arrays), PartitionSpec(names)
    placed = [_placed(array, NamedSharding(mesh, PartitionSpec(names, *_spec(array)[1:]))) for array in arrays]
    return jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, axis_names=set(names))(placed)


def mesh_of(arrays: Any) -> Any:
    """Return the mesh of the arrays if it has an explicit axis with more than one device, otherwise ``None``."""
    for array in jax.tree.leaves(arrays):
        mesh = jax.typeof(array).sharding.mesh
        if not mesh.empty and any(mesh.shape[name] > 1 for name in _explicit_axes(mesh)):
            return mesh
    return None


def _explicit_axes(mesh: Any) -> set[str]:
    return {name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind is AxisType.Explicit}


def _spec(array: jax.Array) -> tuple[Any, ...]:
    spec = tuple(jax.typeof(array).sharding.spec)
    return spec + (None,) * (array.ndim - len(spec))


@dataclasses.dataclass(frozen=True)
class _SplitAxes:
    """The mesh axes that split the arrays of a call.

    Attributes:
        batch: Mesh axes that split the batch.
        tokens: Mesh axes that split each token dimension.
        heads: Mesh axes that split the query heads.
        are_heads_kv_split: True if the axes in ``heads`` also split the key/value heads.
    """

    batch: _Axes
    tokens: Sequence[_Axes]
    heads: _Axes
    are_heads_kv_split: bool

    @classmethod
    def from_inputs(cls, inputs: Inputs) -> _SplitAxes:
        """Read the mesh axes of each dimension from the type of the query.

        If the query is not split in a dimension, read the axes from the type of the key or of the value.
        """
        specs = [_spec(array)[:-1] for array in (inputs.query, inputs.key, inputs.value)]
        axes: list[_Axes] = [axis_names(entry) for entry in specs[0]]
        for spec in specs[1:]:
            for i, entry in enumerate(spec):
                used = {name for own in axes for name in own}
                axes[i] = axes[i] or tuple(name for name in axis_names(entry) if name not in used)
        batch, *tokens, heads = axes
        return cls(batch, tokens, heads, axis_names(_spec(inputs.key)[-2]) == heads)

    def spec(self, role: Role, ndim: int) -> PartitionSpec:
        """Return the partition spec of an array with the role ``role`` and ``ndim`` dimensions."""
        if role is Role.WHOLE:
            return PartitionSpec()
        axes = [() if role is Role.PER_HEAD_OF_ALL_ENTRIES else self.batch, *(self.tokens if role.has_layout else ())]
        if role.heads_axis:
            axes += [()] * (ndim + role.heads_axis - len(axes))
            axes += [self.heads if self.are_heads_kv_split or not role.is_key_value else ()]
            axes += [()] * (ndim - len(axes))
        return PartitionSpec(*(names or None for names in axes))
