"""Split a pass over mesh axes that JAX leaves to XLA's partitioner (``AxisType.Auto``).

The pass is lowered to a custom call with a sharding rule. The partitioner replaces this call by the program that each
device runs on its shards. Queries and outputs stay split over the batch, over the heads and, in neighborhood attention,
over the tokens. They cannot be split over ``head_dim``. If possible, key/value heads are split like the query heads
that share them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import CompoundFactor, SdyShardingRule, custom_partitioning
from jax.interpreters import mlir
from jax.sharding import AbstractMesh

from natten_jax.arguments.static import warn_of_line
from natten_jax.arrays.operands import Role
from natten_jax.sharding import _jax_internals
from natten_jax.sharding.halos.exchange import DeviceLine
from natten_jax.version import __version__


@dataclasses.dataclass(frozen=True)
class HeadSplit:
    """Split of the query heads into equal parts, and of the key/value heads that these parts read.

    Attributes:
        heads: Number of query heads.
        heads_kv: Number of key/value heads. Each is shared by the same number of consecutive query heads.
        parts: Number of equal parts of the query heads; it divides ``heads``.
        kv_parts: Number of equal parts of the key/value heads. If it is greater than 1, each part of the query heads
            reads one of these parts. If it is 1, the key/value heads are not split, and each part of the query heads
            reads the key/value heads in :attr:`needed`.
    """

    heads: int
    heads_kv: int
    parts: int
    kv_parts: int

    @classmethod
    def for_parts(cls, heads: int, heads_kv: int, parts: int, kv_parts: int) -> HeadSplit:
        """Split the query heads into ``parts``. Keep the key/value heads split into ``kv_parts`` if possible.

        It is possible if ``kv_parts`` equals ``parts``, or if each key/value head is a separate part and ``heads_kv``
        divides ``parts``. Otherwise the key/value heads are not split.
        """
        fits = kv_parts == parts or (kv_parts == heads_kv and parts % heads_kv == 0)
        return cls(heads, heads_kv, parts, kv_parts if fits else 1)

    @property
    def reads_subset(self) -> bool:
        """Return True if key/value heads are not split, and each part of the query heads can read a subset of them."""
        return self.kv_parts == 1 < min(self.parts, self.heads_kv)

    @functools.cached_property
    def needed(self) -> np.ndarray:
        """Key/value heads that each part of the query heads reads, with a row per part.

        A *group* is the query heads that share a key/value head. If every part consists of whole groups, or is
        contained in one group, a row lists each key/value head once. Otherwise a row has one entry per query head.
        """
        groups = self.heads // self.heads_kv
        kv_heads = (np.arange(self.heads) // groups).reshape(self.parts, -1)
        local = kv_heads.shape[1]
        if local % groups == 0:
            return kv_heads[:, ::groups]
        return kv_heads[:, :1] if groups % local == 0 else kv_heads

    def run_on_subset(
        self,
        run: Callable[..., Any],
        arrays: Sequence[jax.Array],
        inputs: Sequence[Role],
        outputs: Sequence[Role],
        part: jax.Array,
    ) -> list[jax.Array]:
        """Run a pass on one part of the query heads and on the key/value heads that the part reads.

        Results with key/value heads, such as key gradients, contain all key/value heads. They are zero for heads that
        the part does not read.
        """
        taken = jnp.asarray(self.needed)[part]
        parts = [
            jnp.take(array, taken, axis=array.ndim - 2) if role.is_key_value else array
            for array, role in zip(arrays, inputs, strict=True)
        ]
        results = run(*parts)
        return [
            jnp.zeros((*result.shape[:-2], self.heads_kv, result.shape[-1]), result.dtype).at[..., taken, :].add(result)
            if role.is_key_value
            else result
            for result, role in zip(results, outputs, strict=True)
        ]


def device_tiles(sharding: Any, ndim: int, devices: int) -> np.ndarray:
    """Return the numbers of the devices that hold each part of an array, ``[*parts, copies, manual]``.

    Args:
        sharding: XLA's ``HloSharding``, or ``None``.
        ndim: Number of dimensions of the array.
        devices: Number of devices over which the partitioner splits arrays.

    Returns:
        The partitioner's device numbers. Devices along the dimension ``copies`` hold copies of the same part. Devices
        along the dimension ``manual`` differ in their positions along manual mesh axes, and hold unrelated arrays. The
        extent of ``manual`` is 1 if the partitioner numbers only the devices at one such position.
    """
    if sharding is None or not sharding.is_tiled():
        return np.arange(devices).reshape((1,) * ndim + (devices, 1))
    tiles = np.asarray(sharding.tile_assignment_devices()).reshape(sharding.tile_assignment_dimensions())
    kinds = [kind.name for kind in sharding.subgroup_types()]
    manual = [ndim + i for i, kind in enumerate(kinds) if kind == "MANUAL"]
    copies = [axis for axis in range(ndim, tiles.ndim) if axis not in manual]
    tiles = tiles.transpose(*range(ndim), *copies, *manual)
    return tiles.reshape(*tiles.shape[:ndim], math.prod(tiles.shape[ndim : ndim + len(copies)]), -1)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Split of a pass over devices, by batch entries, tokens and heads.

    Attributes:
        tiles: The partitioner's device numbers, ``[*batch parts, *token parts, head parts, copies, manual]``.
        batch_axes: Number of leading batch dimensions: the axes that ``jax.vmap`` maps, and the batch.
        heads: Split of the heads.
        devices: The program's device numbers, indexed by the partitioner's device numbers, ``[manual, devices]``. If
            the partitioner numbers only the devices at one position along the manual mesh axes, there is a row for each
            such position. Otherwise there is one row.
    """

    tiles: np.ndarray
    batch_axes: int
    heads: HeadSplit
    devices: np.ndarray

    @classmethod
    def for_query(
        cls,
        tiles: np.ndarray,
        devices: np.ndarray,
        shape: Sequence[int],
        batch_axes: int,
        heads_kv: int,
        kv_parts: int,
        *,
        splits_tokens: bool,
    ) -> Layout:
        """Create the layout that keeps the sharding of the query as far as possible.

        Args:
            tiles: Device numbers of the parts of the query, from :func:`device_tiles`.
            devices: The program's device numbers, indexed by the partitioner's device numbers, ``[manual, devices]``.
            shape: The shape of the query.
            batch_axes: Number of leading batch dimensions.
            heads_kv: Number of key/value heads.
            kv_parts: Number of parts of the key/value heads in the sharding of the key.
            splits_tokens: True if token dimensions can stay split.
        """
        ndim = len(shape)
        kept = [
            shape[axis] % tiles.shape[axis] == 0 and (splits_tokens or not batch_axes <= axis < ndim - 2)
            for axis in range(ndim - 1)
        ]
        parts = [count if keeps else 1 for count, keeps in zip(tiles.shape, kept, strict=False)]
        order = [axis for axis in range(ndim - 1) if kept[axis]]
        copied = [axis for axis in range(ndim + 1) if axis not in order]
        tiles = tiles.transpose(*order, *copied, ndim + 1).reshape(*parts, -1, tiles.shape[-1])
        return cls(tiles, batch_axes, HeadSplit.for_parts(shape[-2], heads_kv, parts[-1], kv_parts), devices)

    @property
    def token_parts(self) -> tuple[int, ...]:
        """Number of parts of each token dimension."""
        return self.tiles.shape[self.batch_axes : -3]

    def tiles_of(self, role: Role, ndim: int) -> np.ndarray:
        """Return the numbers of the devices that hold each part of an array, ``[*parts, copies, manual]``."""
        if role is Role.WHOLE:
            return self.tiles.reshape((1,) * ndim + (-1, self.tiles.shape[-1]))
        tiles = self._contributing(role)
        *leading, heads, contributions, copies, manual = tiles.shape
        parts = [*leading, *(1,) * (ndim - len(leading))]
        if not role.heads_axis:
            return tiles.reshape(*parts, heads * contributions * copies, manual)
        parts[ndim + role.heads_axis] = heads
        return tiles.reshape(*parts, contributions * copies, manual)

    def line(self, dimension: int) -> np.ndarray:
        """Return the program's device numbers along a token dimension, ``[lines, parts]``.

        A *line* is the devices whose parts differ only in this dimension, in the order of their parts.
        """
        rows = np.moveaxis(self.tiles, self.batch_axes + dimension, -1)
        return self._program_devices(rows.reshape(-1, rows.shape[-1]))

    def groups(self, role: Role) -> np.ndarray:
        """Return groups of devices that compute the same part of a result from different queries.

        The shape is ``[groups, devices]``, with the program's device numbers. The results in each group are added.
        """
        rows = np.moveaxis(self._contributing(role), -3, -1)
        return self._program_devices(rows.reshape(-1, rows.shape[-1]))

    def head_parts(self) -> np.ndarray:
        """Return, for each device of the program, the index of its part of the query heads."""
        parts = np.empty(self.devices.size, np.int32)
        parts[self.devices[:, self.tiles]] = np.arange(self.heads.parts, dtype=np.int32)[:, None, None]
        return parts

    def _contributing(self, role: Role) -> np.ndarray:
        """Return the numbers of the devices that use each part of an array.

        The shape is ``[*leading, heads, contributions, copies, manual]``. Devices along the dimension ``contributions``
        hold different queries that use the same part of the array:

        - queries of all heads that read the same part of the key/value heads if the array has key/value heads,
        - queries of all heads if the array has no head dimension,
        - queries of all tokens if the array has no token dimensions,
        - queries of all batch entries if these share the array.
        """
        *leading, heads, copies, manual = self.tiles.shape
        parts = self.heads.kv_parts if role.is_key_value else heads if role.heads_axis else 1
        tiles = self.tiles.reshape(*leading, parts, heads // parts, copies, manual)
        if role.has_layout:
            return tiles
        is_shared = role is Role.PER_HEAD_OF_ALL_ENTRIES
        batch = self.batch_axes - is_shared
        unmapped = range(batch, len(leading))
        tiles = np.moveaxis(tiles, unmapped, range(-3 - len(unmapped), -3))
        return tiles.reshape(*leading[:batch], *(1,) * is_shared, parts, -1, copies, manual)

    def _program_devices(self, rows: np.ndarray) -> np.ndarray:
        return self.devices[:, rows].reshape(-1, rows.shape[-1])


def sharding_like(like: Any, tiles: np.ndarray) -> Any:
    """Convert device numbers in the format of :func:`device_tiles` to the ``HloSharding`` class of ``like``."""
    *parts, copies, manual = tiles.shape
    proto = like.to_proto()
    kinds = type(proto).Type
    new = type(proto)()
    if tiles.size == copies:
        new.type = kinds.REPLICATED
        return type(like).from_proto(new)
    new.type = kinds.OTHER
    trailing = [(copies, kinds.REPLICATED), (manual, kinds.MANUAL)]
    new.tile_assignment_dimensions = [*parts, *(size for size, _ in trailing if size > 1)]
    new.tile_assignment_devices = tiles.reshape(-1).tolist()
    new.last_tile_dims = [kind for size, kind in trailing if size > 1]
    return type(like).from_proto(new)


#: Function that a device runs: it takes the device's parts of the arguments and returns its parts of the results.
Local = Callable[..., list[jax.Array]]
_DEVICES = "natten_jax_devices"
NO_EXPORT = (
    "a program for several devices cannot be exported if their mesh has axes of type Auto: call the operator inside "
    "jax.shard_map, or make the axes Explicit"
)
NO_TPU = (
    "the TPU compiler splits only plain JAX, flex-*. For kernels call the operator inside jax.shard_map, or make "
    "the axes Explicit"
)


def is_needed(ctx: mlir.LoweringRuleContext) -> bool:
    """Return True if XLA's partitioner splits the program that is being lowered."""
    numbers = _jax_internals.device_numbers(ctx)
    return numbers is not None and numbers.shape[1] > 1


def lower_for_one(function: Callable[..., Any], ctx: mlir.LoweringRuleContext, values: Sequence[Any]) -> Any:
    """Lower a function that runs on a single device and returns several results.

    The argument types are replaced by types without meshes. Otherwise the transposes that JAX derives would contain
    sums over the mesh axes along which some arguments vary and others do not.
    """
    arguments: Sequence[Any] = ctx.avals_in
    avals = [jax.core.ShapedArray(each.shape, each.dtype) for each in arguments]
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        return mlir.lower_fun(function, multiple_results=True)(ctx.replace(avals_in=avals), *values)


@dataclasses.dataclass(frozen=True, eq=False)
class Partitioned:
    """A pass that the partitioner splits.

    Attributes:
        ctx: Lowering context of the pass.
        identity: Text that identifies the computation; equal passes have equal texts in every process.
        local: Function that each device runs on its parts of the arguments.
        inputs: Roles of the arguments.
        outputs: Roles of the results.
        batch_axes: Number of leading batch dimensions of all arrays: the axes that ``jax.vmap`` maps, and the batch.
        splits_tokens: True if token dimensions can be split. Queries and keys then have equal token dimensions.
    """

    ctx: mlir.LoweringRuleContext
    identity: str
    local: Local
    inputs: Sequence[Role]
    outputs: Sequence[Role]
    batch_axes: int
    splits_tokens: bool

    @functools.cached_property
    def devices(self) -> np.ndarray:
        """The program's device numbers; see :func:`natten_jax.sharding._jax_internals.device_numbers`."""
        numbers = _jax_internals.device_numbers(self.ctx)
        assert numbers is not None
        return numbers

    def lower(self, values: Sequence[Any]) -> Any:
        """Lower the pass to a custom call that the partitioner replaces.

        Raises:
            NotImplementedError: The program is being exported.
        """
        ctx = self.ctx
        if _jax_internals.is_exported(ctx):
            raise NotImplementedError(NO_EXPORT)
        arguments: Sequence[Any] = ctx.avals_in
        outputs: Sequence[Any] = ctx.avals_out
        types = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in outputs]

        @custom_partitioning
        def whole(*_: jax.Array) -> list[jax.Array]:
            return [jnp.zeros(each.shape, each.dtype) for each in types]  # JAX only uses the types of the results

        rule = self._rule(arguments, types)
        whole.def_partition(partition=self._partition, sharding_rule=rule, decode_shardings=False)
        results = lower_for_one(whole, _jax_internals.with_numbered_devices(ctx, self.devices.size), values)
        # The key of the persistent compilation cache includes the callback's name. So the name contains everything that
        # the callback depends on. If the name were an address in memory, another process would not find the program in
        # the cache. Without a name, a process would find the program of another pass.
        platforms = _jax_internals.platforms_of(ctx)
        name = f"natten_jax {__version__} {self.identity} {platforms} {self.devices.tolist()}"
        _jax_internals.name_partitioner_callback(results[0].owner, name)
        return results

    def _rule(self, arguments: Sequence[Any], results: Sequence[Any]) -> SdyShardingRule:
        """Return the sharding rule: all arrays split batch, heads and (if ``splits_tokens``) tokens in the same way.

        Each other dimension of an array is split independently. If several query heads share a key/value head, the
        dimension of the query heads has two factors: the key/value heads, and the query heads per key/value head.

        In two cases query heads and key/value heads are split independently: if there is only one key/value head, or if
        the devices can split the query heads into a number of parts that does not divide the key/value heads.
        """
        heads, heads_kv = arguments[0].shape[-2], arguments[1].shape[-2]
        devices = self.devices.shape[1]
        # The partitioner can also split arrays over a part of a mesh axis. So every divisor of the number of devices is
        # a possible number of parts.
        parts = [n for n in range(1, devices + 1) if devices % n == 0]
        fresh = map("other{}".format, itertools.count())
        sizes: dict[str, Any] = {}
        query_heads: Any = "heads"
        if heads_kv == 1 or any(heads % n == 0 and heads_kv % n != 0 for n in parts):
            query_heads = "query_heads"
        elif heads != heads_kv:
            query_heads = CompoundFactor("heads", "group")
            sizes["group"] = heads // heads_kv

        def mapping(role: Role, shape: Sequence[int]) -> Any:
            if role is Role.WHOLE:
                return tuple([next(fresh) for _ in shape])
            factors: list[Any] = [f"batch{i}" for i in range(self.batch_axes)]
            factors += [next(fresh) for _ in shape[self.batch_axes :]]
            if role is Role.PER_HEAD_OF_ALL_ENTRIES:
                factors[self.batch_axes - 1] = next(fresh)
            if role.has_layout and self.splits_tokens:
                tokens = range(self.batch_axes, len(shape) + role.heads_axis)
                factors[tokens.start : tokens.stop] = [f"tokens{axis}" for axis in tokens]
            if role.heads_axis:
                factors[len(shape) + role.heads_axis] = "heads" if role.is_key_value else query_heads
            return tuple(factors)

        return SdyShardingRule(
            tuple(mapping(role, each.shape) for role, each in zip(self.inputs, arguments, strict=True)),
            tuple(mapping(role, each.shape) for role, each in zip(self.outputs, results, strict=True)),
            **sizes,
        )

    def _partition(self, _: Any, arguments: Sequence[Any], results: Sequence[Any]) -> tuple[Any, ...]:
        """Partitioner callback: return the mesh, the local function, and the shardings of its results and arguments."""
        query, key = arguments[:2]
        hlo = _jax_internals.hlo_sharding_of(query.sharding, len(query.shape))
        kv_parts = self._tiles(key).shape[len(key.shape) - 2]
        tiles = self._tiles(query)
        numbers = self.devices if tiles.size == self.devices.shape[1] else self.devices.reshape(1, -1)
        layout = Layout.for_query(
            tiles, numbers, query.shape, self.batch_axes, key.shape[-2], kv_parts, splits_tokens=self.splits_tokens
        )
        self._warn_of_gathers(arguments, layout)

        def shardings(roles: Sequence[Role], arrays: Sequence[Any]) -> list[Any]:
            return [
                _jax_internals.sharding_of(sharding_like(hlo, layout.tiles_of(role, len(array.shape))), query.sharding)
                for role, array in zip(roles, arrays, strict=True)
            ]

        mesh = AbstractMesh((self.devices.size,), (_DEVICES,))
        local = functools.partial(self._run, layout)
        return mesh, local, shardings(self.outputs, results), tuple(shardings(self.inputs, arguments))

    def _run(self, layout: Layout, *leaves: jax.Array) -> list[jax.Array]:
        """Compute one device's parts of the results."""
        split = layout.heads
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            lines = [_line_of(layout, dimension) for dimension in range(len(layout.token_parts))]
            local = functools.partial(self.local, lines=lines) if any(lines) else self.local
            if split.reads_subset:
                part = jnp.asarray(layout.head_parts())[jax.lax.axis_index(_DEVICES)]
                results = split.run_on_subset(local, leaves, self.inputs, self.outputs, part)
            else:
                results = local(*leaves)
            groups = [layout.groups(role) for role in self.outputs]
            return [
                jax.lax.psum(result, _DEVICES, axis_index_groups=group.tolist()) if group.shape[-1] > 1 else result
                for result, group in zip(results, groups, strict=True)
            ]

    def _tiles(self, array: Any) -> np.ndarray:
        ndim = len(array.shape)
        return device_tiles(_jax_internals.hlo_sharding_of(array.sharding, ndim), ndim, self.devices.shape[1])

    def _warn_of_gathers(self, arguments: Sequence[Any], layout: Layout) -> None:
        for name, role, array in zip(("query", "key", "value"), self.inputs, arguments, strict=False):
            ndim, tiles = len(array.shape), self._tiles(array)
            kept = layout.tiles_of(role, ndim).shape
            for axis in range(self.batch_axes, ndim):
                if axis != ndim + role.heads_axis and tiles.shape[axis] > kept[axis]:
                    warn_of_gather(name, axis, ndim, f"{tiles.shape[axis]} devices")


def _line_of(layout: Layout, dimension: int) -> DeviceLine | None:
    """Return the devices over which a token dimension is split; ``None`` if the dimension is not split."""
    rows = layout.line(dimension)
    count, parts = rows.shape
    if parts == 1:
        return None
    positions = np.empty(layout.devices.size, np.int32)
    positions[rows] = np.arange(parts, dtype=np.int32)

    def permute(array: jax.Array, moves: Sequence[tuple[int, int]]) -> jax.Array:
        device_moves = [(int(row[start]), int(row[end])) for row in rows for start, end in moves]
        return jax.lax.ppermute(array, _DEVICES, device_moves)

    def gather(array: jax.Array, axis: int) -> jax.Array:
        groups = rows.tolist() if count > 1 else None
        return jax.lax.all_gather(array, _DEVICES, axis=axis, tiled=True, axis_index_groups=groups)

    return DeviceLine(parts, jnp.asarray(positions)[jax.lax.axis_index(_DEVICES)], permute, gather)


def warn_of_gather(name: str, axis: int, ndim: int, over: str) -> None:
    """Warn that a dimension is gathered, and suggest an alternative."""
    kind = "head_dim" if axis == ndim - 1 else f"token dimension {axis}"
    warn_of_line(
        f"natten_jax gathers {name} on every device, which costs time and memory, because its {kind} is split over "
        f"{over}: split batch or heads instead"
    )
