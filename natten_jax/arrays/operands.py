"""Operands and results of passes by role, and abstract types of results.

The annotation of an array gives its role and its shape in jaxtyping's notation. ``*queries`` and ``*keys`` stand for
all token dimensions of the problem. Equal names in a call mean equal extents.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple, TypeVar, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec


class Role(enum.Enum):
    """Semantics of an operand's dimensions.

    - ``QUERY``: queries, outputs and their gradients.
    - ``KEY_VALUE``: keys, values and their gradients.
    - ``ADDITIONAL``: tokens that every query sees.
    - ``PER_QUERY``: a number for each query and head, such as the logsumexp.
    - ``PER_KEY``, ``PER_KEY_OF_ALL_HEADS``: a number for each key, per query head or shared by all heads.
    - ``PER_HEAD``: a number for each batch entry and head, such as a scale.
    - ``PER_HEAD_OF_ALL_ENTRIES``: numbers per head that all batch entries share; the batch dimension is 1.
    - ``PER_ENTRY``: numbers per batch entry.
    - ``WHOLE``: arrays that no mesh splits, such as origins, whose values differ between devices.

    All except ``WHOLE`` begin with the batch, after the axes that ``jax.vmap`` maps.

    Attributes:
        heads_axis: Dimension of the heads, counted from the end; 0 without heads.
        tokens: Kind of the token dimensions after the batch: ``"queries"``, ``"keys"`` or ``None``.
        has_layout: The array has token dimensions.
        is_key_value: The heads are key/value heads.
    """

    QUERY = ("query", -2, "queries", False)
    KEY_VALUE = ("key_value", -2, "keys", True)
    ADDITIONAL = ("additional", -2, None, True)
    PER_QUERY = ("per_query", -1, "queries", False)
    PER_KEY = ("per_key", -2, "keys", False)
    PER_KEY_OF_ALL_HEADS = ("per_key_of_all_heads", 0, "keys", False)
    PER_HEAD = ("per_head", -1, None, False)
    PER_HEAD_OF_ALL_ENTRIES = ("per_head_of_all_entries", -2, None, False)
    PER_ENTRY = ("per_entry", 0, None, False)
    WHOLE = ("whole", 0, None, False)

    def __init__(self, _: str, heads_axis: int, tokens: str | None, is_key_value: bool) -> None:
        self.heads_axis = heads_axis
        self.tokens = tokens
        self.has_layout = tokens is not None
        self.is_key_value = is_key_value

    @property
    def is_of_heads(self) -> bool:
        """True if it has numbers per query head, but not per token."""
        return self in (Role.PER_HEAD, Role.PER_HEAD_OF_ALL_ENTRIES)


def roles_of(*arguments: Any) -> Sequence[Role]:
    """Role of each array in operands, results, gradients and boxes, in the order of ``jax.tree.leaves``."""
    return _roles_of(jax.tree.structure(arguments))


@functools.lru_cache(maxsize=1024)
def _roles_of(structure: Any) -> Sequence[Role]:
    found: list[Role] = []
    for argument in jax.tree.unflatten(structure, range(structure.num_leaves)):
        if isinstance(argument, tuple):
            arrays = [array for each in argument for array in (each if isinstance(each, tuple) else (each,))]
            pairs = zip(arrays, roles_of_fields(type(argument)), strict=True)
            found += [role for array, role in pairs if array is not None]
        else:
            found += [Role.WHOLE] * len(jax.tree.leaves(argument))  # of a box
    return found


@functools.cache
def roles_of_fields(kind: type) -> tuple[Role, ...]:
    """Return the role of each field from its annotation; nested tuples are expanded."""
    found: list[Role] = []
    for hint in get_type_hints(kind, include_extras=True).values():
        roles = [each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Role)]
        found += roles or roles_of_fields(hint)
    return tuple(found)


class Inputs(NamedTuple):
    """The differentiable arrays of a call, heads last, in the caller's rank.

    Attributes:
        query: Queries.
        key: Keys.
        value: Values.
        additional_keys: Keys that every query sees, or ``None``.
        additional_values: Their values, or ``None``.
        scale: In the accumulator's element type. Factors of the logits, which replace the problem's scale; ``None``
            uses the problem's scale.
        relative_bias: In the accumulator's element type. Added to logits, for each offset of a key from a query within
            a window, in the flattened shape :attr:`natten_jax.problem.Problem.bias_shape`; or ``None``. All batch
            entries share a table; if axes that ``jax.vmap`` maps have been merged into the batch, each entry has its
            table.
        key_bias: In the accumulator's element type. Added to the logits of a key; or ``None``.
        shared_key_bias: Replaces ``key_bias`` if all heads have the same bias; or ``None``.
        sinks: In the accumulator's element type. A logit per head that is added only to the softmax denominator; or
            ``None``. All batch entries share the sinks, or each entry has its sinks, as for ``relative_bias``.
        key_scale: float32. Factors of each key, in addition to the factors of the logits; or ``None``.
        value_scale: float32. Factors of each value, in addition to the factors of the output; or ``None``.
        out_scale: float32. Factors of the output of 8-bit arrays, from the per-head factors of values; or ``None``.
    """

    query: Annotated[jax.Array, Role.QUERY, "batch *queries heads head_dim"]
    key: Annotated[jax.Array, Role.KEY_VALUE, "batch *keys heads_kv head_dim"]
    value: Annotated[jax.Array, Role.KEY_VALUE, "batch *keys heads_kv head_dim_v"]
    additional_keys: Annotated[jax.Array | None, Role.ADDITIONAL, "batch additional_kv heads_kv head_dim"] = None
    additional_values: Annotated[jax.Array | None, Role.ADDITIONAL, "batch additional_kv heads_kv head_dim_v"] = None
    scale: Annotated[jax.Array | None, Role.PER_HEAD, "batch heads"] = None
    relative_bias: Annotated[jax.Array | None, Role.PER_HEAD_OF_ALL_ENTRIES, "tables heads entries"] = None
    key_bias: Annotated[jax.Array | None, Role.PER_KEY, "batch *keys heads 1"] = None
    shared_key_bias: Annotated[jax.Array | None, Role.PER_KEY_OF_ALL_HEADS, "batch *keys"] = None
    sinks: Annotated[jax.Array | None, Role.PER_HEAD_OF_ALL_ENTRIES, "tables heads 1"] = None
    key_scale: Annotated[jax.Array | None, Role.KEY_VALUE, "batch *keys heads_kv 1"] = None
    value_scale: Annotated[jax.Array | None, Role.KEY_VALUE, "batch *keys heads_kv 1"] = None
    out_scale: Annotated[jax.Array | None, Role.PER_HEAD, "batch heads"] = None


#: Cotangents of the inputs, in their shapes and element types.
Gradients = Inputs


def key_arrays(inputs: Inputs) -> dict[str, jax.Array]:
    """Return by name the inputs, or gradients of inputs, that have a value per key."""
    fields = zip(Inputs._fields, roles_of_fields(Inputs), inputs, strict=True)
    return {name: array for name, role, array in fields if role.tokens == "keys" and array is not None}


class Operands(NamedTuple):
    """The arrays of a pass.

    Attributes:
        inputs: Differentiable arrays.
        origins: int32. First local query token and first local key/value token in the global layout, last dimension
            last; ``None`` if both cover the whole layout.
        layouts: int32. Replaces origins if batch entries differ: for each entry the first query, and the numbers of
            queries and of keys and values in its layout, last dimension last. ``None`` if entries are equal.
    """

    inputs: Inputs
    origins: Annotated[jax.Array | None, Role.WHOLE, "2 3"] = None
    layouts: Annotated[jax.Array | None, Role.PER_ENTRY, "batch 3 3"] = None

    @property
    def is_placed(self) -> bool:
        """Return True if queries or keys are part of a layout. Some queries may then see no keys."""
        return self.origins is not None or self.layouts is not None

    def placed(self, origins: jax.Array | None, **arrays: Any) -> Operands:
        """Return the operands at other origins, with other arrays in place of some inputs."""
        return self._replace(inputs=self.inputs._replace(**arrays), origins=origins)

    def with_origins_alone(self) -> Operands:
        """Convert the layouts of a single batch entry without padding to origins."""
        if self.layouts is None:
            return self
        assert self.layouts.shape[0] == 1, "one entry of the batch at a time"
        query_origin = self.layouts[0, 0]
        return self._replace(origins=jnp.stack([query_origin, jnp.zeros_like(query_origin)]), layouts=None)


class Output(NamedTuple):
    """Output and logsumexp."""

    out: Annotated[jax.Array, Role.QUERY, "batch *queries heads head_dim_v"]
    logsumexp: Annotated[jax.Array, Role.PER_QUERY, "batch *queries heads"]


class Cotangents(NamedTuple):
    """Cotangents of output and logsumexp; ``None`` means zeros, because a call rarely differentiates its logsumexp."""

    out: Annotated[jax.Array, Role.QUERY, "batch *queries heads head_dim_v"]
    logsumexp: Annotated[jax.Array | None, Role.PER_QUERY, "batch *queries heads"] = None

    def with_zeros(self) -> Output:
        """Replace a missing cotangent by zeros."""
        zeros = jnp.zeros(self.out.shape[:-1], jnp.promote_types(self.out.dtype, jnp.float32))
        return Output(self.out, zeros if self.logsumexp is None else self.logsumexp)


def delta(out: jax.Array, out_cotangent: jax.Array, logsumexp_cotangent: jax.Array | None) -> jax.Array:
    """Return ``sum(out * d_out) - d_logsumexp`` in float32, one value per query and head."""
    products = jnp.sum(out_cotangent.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    return products if logsumexp_cotangent is None else products - logsumexp_cotangent


class Saved(NamedTuple):
    """Values that the backward pass reads from the forward pass, including the rounding error of the logsumexp.

    Attributes:
        out: As in :class:`Output`.
        logsumexp: As in :class:`Output`.
        remainder: float32, in base 2 (csrc/include/natten_jax/logsumexp.h). Without it, the rounding of the logsumexp
            of large logits could change weights by an arbitrary factor. ``None`` if another backend computed the
            output: logits differ between backends by as much as the remainder corrects.
    """

    out: Annotated[jax.Array, Role.QUERY, "batch *queries heads head_dim_v"]
    logsumexp: Annotated[jax.Array, Role.PER_QUERY, "batch *queries heads"]
    remainder: Annotated[jax.Array | None, Role.PER_QUERY, "batch *queries heads"]


class Differentiable(NamedTuple):
    """Results of plain JAX that can be differentiated.

    Attributes:
        out: As in :class:`Output`, but in the accumulator's element type, which makes derivatives more accurate.
        logsumexp: As in :class:`Output`.
        residuals: In the accumulator's element type. Further residuals of the derivative; ``None`` if not needed.
    """

    out: Annotated[jax.Array, Role.QUERY, "batch *queries heads head_dim_v"]
    logsumexp: Annotated[jax.Array, Role.PER_QUERY, "batch *queries heads"]
    residuals: Annotated[jax.Array | None, Role.QUERY, "batch *queries heads width"] = None


_Tree = TypeVar("_Tree")


def vary_alike(arrays: _Tree) -> _Tree:
    """Inside ``jax.shard_map``, make all arrays vary over the mesh axes that any of them varies over.

    Outside of derivative rules, JAX transposes this function: gradients are summed over the added axes.
    """
    return varying_like(arrays, arrays)


def varying_like(carry: _Tree, arrays: Any) -> _Tree:
    """Make ``carry`` vary over the manual mesh axes of ``arrays``, as ``jax.shard_map`` requires of scans."""
    axes: frozenset[str] = frozenset()
    axes = axes.union(*[jax.typeof(leaf).manual_axis_type.varying for leaf in jax.tree.leaves(arrays)])
    if not axes:
        return carry

    def over_all(array: jax.Array) -> jax.Array:
        missing = axes - jax.typeof(array).manual_axis_type.varying
        return jax.lax.pcast(array, tuple(missing), to="varying") if missing else array

    result: _Tree = jax.tree.map(over_all, carry)
    return result


def types_like(array: Any, *types: tuple[Sequence[int], Any]) -> list[Any]:
    """Return abstract types of results on the same devices as ``array``, which may be an abstract type.

    The results vary over the same mesh axes inside ``jax.shard_map`` and lie on the same mesh. Like operands, they are
    not sharded over explicit axes; their sharding has an entry per dimension.

    Args:
        array: The array.
        *types: Shapes and element types.
    """
    like = array if isinstance(array, jax.core.ShapedArray) else jax.typeof(array)
    whole = [like.sharding.update(spec=PartitionSpec(*[None] * len(shape))) for shape, _ in types]
    return [
        like.update(shape=tuple(shape), dtype=np.dtype(dtype), sharding=sharding)
        for (shape, dtype), sharding in zip(types, whole, strict=True)
    ]
