"""Named tuples of the operands and results of passes, the role of each array, and abstract types of results.

The annotation of an array gives its role and its shape, in jaxtyping's notation. In shapes, ``*queries`` and ``*keys``
stand for all token dimensions of the problem. Dimensions with the same name have the same extent in all arrays of a
call.
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
    - ``ADDITIONAL``: additional keys and values, which every query sees.
    - ``PER_QUERY``: one number per query and head, such as the logsumexp.
    - ``PER_KEY``: one number per key and query head.
    - ``PER_KEY_OF_ALL_HEADS``: one number per key, shared by all heads.
    - ``PER_HEAD``: one number per batch entry and head, such as a scale.
    - ``PER_HEAD_OF_ALL_ENTRIES``: a row of numbers per head. All batch entries share the row, and the batch dimension
      has extent 1, unless axes that ``jax.vmap`` maps have been merged into the batch.
    - ``PER_ENTRY``: several numbers per batch entry, such as the extents of its layout.
    - ``WHOLE``: arrays that are not sharded, such as the origins. Inside ``jax.shard_map``, their values may differ
      between devices.

    Arrays of all roles except ``WHOLE`` have a batch dimension. It is the first dimension after the axes that
    ``jax.vmap`` maps.

    Attributes:
        heads_axis: Index of the head dimension, counted from the end (negative); 0 if the array has no head dimension.
        tokens: Kind of the token dimensions, which follow the batch dimension: ``"queries"`` or ``"keys"``. ``None`` if
            the array has no token dimensions.
        has_layout: True if ``tokens`` is not ``None``.
        is_key_value: True if the head dimension counts key/value heads.
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
        """True for the roles of arrays that have numbers per query head but no token dimensions."""
        return self in (Role.PER_HEAD, Role.PER_HEAD_OF_ALL_ENTRIES)


def roles_of(*arguments: Any) -> Sequence[Role]:
    """Return the role of each array in operands, results, gradients and boxes, in the order of ``jax.tree.leaves``."""
    return _roles_of(jax.tree.structure(arguments))


@functools.lru_cache(maxsize=1024)
def _roles_of(structure: Any) -> Sequence[Role]:
    roles: list[Role] = []
    for argument in jax.tree.unflatten(structure, range(structure.num_leaves)):
        if isinstance(argument, tuple):
            arrays = [array for each in argument for array in (each if isinstance(each, tuple) else (each,))]
            pairs = zip(arrays, roles_of_fields(type(argument)), strict=True)
            roles += [role for array, role in pairs if array is not None]
        else:
            roles += [Role.WHOLE] * len(jax.tree.leaves(argument))  # arrays of a QueryBox
    return roles


@functools.cache
def roles_of_fields(kind: type) -> tuple[Role, ...]:
    """Return the roles of all arrays in a named tuple type, from its annotations. Nested named tuples are expanded."""
    roles: list[Role] = []
    for hint in get_type_hints(kind, include_extras=True).values():
        annotated = [each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Role)]
        roles += annotated or roles_of_fields(hint)
    return tuple(roles)


class Inputs(NamedTuple):
    """The differentiable arrays of a call, with as many token dimensions as the caller's arrays.

    Attributes:
        query: Queries.
        key: Keys.
        value: Values.
        additional_keys: Keys that every query sees, in addition to the keys in its window; or ``None``.
        additional_values: Values of the additional keys, or ``None``.
        scale: In the accumulator's element type. Factors of the logits, which replace the problem's scale; ``None`` if
            the logits are multiplied by the problem's scale.
        relative_bias: In the accumulator's element type. Tables of biases that are added to the logits, or ``None``.
            The last dimension is :attr:`natten_jax.problem.Problem.bias_shape`, flattened: one bias per offset of a key
            from a query. All batch entries share one table, unless axes that ``jax.vmap`` maps have been merged into
            the batch. In that case there is a table per batch entry.
        key_bias: In the accumulator's element type. Bias that is added to all logits of a key; or ``None``.
        shared_key_bias: In the accumulator's element type. One bias per key, shared by all heads; or ``None``.
            ``key_bias`` and ``shared_key_bias`` are never given together.
        sinks: In the accumulator's element type. One logit per head, whose exponential is added only to the softmax
            denominator; or ``None``. All batch entries share the sinks, with the same exception as for
            ``relative_bias``.
        key_scale: float32. One factor per key vector, if the 8-bit keys have a factor per block; otherwise ``None``.
            Logits are multiplied by this factor and by ``scale``.
        value_scale: float32. One factor per value vector, if the 8-bit values have a factor per block; otherwise
            ``None``.
        out_scale: float32. Factors of the output, if the 8-bit values have a factor per head; otherwise ``None``.
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


#: Cotangents of the inputs. Each one has the shape and element type of its input.
Gradients = Inputs


def key_arrays(inputs: Inputs) -> dict[str, jax.Array]:
    """Return the arrays that have a key dimension, by name. ``inputs`` may be a tuple of gradients."""
    fields = zip(Inputs._fields, roles_of_fields(Inputs), inputs, strict=True)
    return {name: array for name, role, array in fields if role.tokens == "keys" and array is not None}


class Operands(NamedTuple):
    """The arrays of a pass.

    Attributes:
        inputs: Differentiable arrays.
        origins: int32. Global coordinates of the first local query (first row) and of the first local key (second row).
            ``None`` if the arrays contain the whole layout.
        layouts: int32. Replaces ``origins`` if the layouts of batch entries differ; otherwise ``None``. The three rows
            of an entry are the coordinates of its first query, the extents of its query layout, and the extents of its
            key/value layout.
    """

    inputs: Inputs
    origins: Annotated[jax.Array | None, Role.WHOLE, "2 3"] = None
    layouts: Annotated[jax.Array | None, Role.PER_ENTRY, "batch 3 3"] = None

    @property
    def is_placed(self) -> bool:
        """Return True if the arrays may contain only part of a layout. A query may then see none of the local keys."""
        return self.origins is not None or self.layouts is not None

    def with_origins(self, origins: jax.Array | None, **arrays: Any) -> Operands:
        """Return the operands with other origins, and with the inputs named in ``arrays`` replaced."""
        return self._replace(inputs=self.inputs._replace(**arrays), origins=origins)

    def with_layouts_as_origins(self) -> Operands:
        """Replace the layouts of a single batch entry, which has no padding, by the equivalent origins."""
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
    """Cotangents of output and logsumexp.

    A logsumexp cotangent of ``None`` stands for zeros. Few calls differentiate the logsumexp, so most passes need no
    array of zeros.
    """

    out: Annotated[jax.Array, Role.QUERY, "batch *queries heads head_dim_v"]
    logsumexp: Annotated[jax.Array | None, Role.PER_QUERY, "batch *queries heads"] = None

    def with_zeros(self) -> Output:
        """Return the cotangents with an array of zeros in place of a missing logsumexp cotangent."""
        zeros = jnp.zeros(self.out.shape[:-1], jnp.promote_types(self.out.dtype, jnp.float32))
        return Output(self.out, zeros if self.logsumexp is None else self.logsumexp)


def delta(out: jax.Array, out_cotangent: jax.Array, logsumexp_cotangent: jax.Array | None) -> jax.Array:
    """Return ``sum(out * d_out) - d_logsumexp`` in float32, one value per query and head."""
    products = jnp.sum(out_cotangent.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    return products if logsumexp_cotangent is None else products - logsumexp_cotangent


class Saved(NamedTuple):
    """Results of the forward pass that the backward pass reads, including the rounding error of the logsumexp.

    Attributes:
        out: As in :class:`Output`.
        logsumexp: As in :class:`Output`.
        remainder: float32. Rounding error of the logsumexp, in base 2 (csrc/include/natten_jax/logsumexp.h). If logits
            are large and the backward pass does not correct this error, the error multiplies the weights by an
            arbitrary factor. ``None`` if another backend computed the forward pass. The logits of two backends differ
            by as much as this error, so a correction would be useless.
    """

    out: Annotated[jax.Array, Role.QUERY, "batch *queries heads head_dim_v"]
    logsumexp: Annotated[jax.Array, Role.PER_QUERY, "batch *queries heads"]
    remainder: Annotated[jax.Array | None, Role.PER_QUERY, "batch *queries heads"]


class Differentiable(NamedTuple):
    """Differentiable results of a forward pass in plain JAX.

    Attributes:
        out: As in :class:`Output`, but in the accumulator's element type, because derivatives are then more accurate.
        logsumexp: As in :class:`Output`.
        residuals: In the accumulator's element type. Further values that the derivative reads; ``None`` if they were
            not computed.
    """

    out: Annotated[jax.Array, Role.QUERY, "batch *queries heads head_dim_v"]
    logsumexp: Annotated[jax.Array, Role.PER_QUERY, "batch *queries heads"]
    residuals: Annotated[jax.Array | None, Role.QUERY, "batch *queries heads width"] = None


_Tree = TypeVar("_Tree")


def vary_alike(arrays: _Tree) -> _Tree:
    """Make all arrays vary over the same mesh axes, as operations inside ``jax.shard_map`` require.

    If one array varies over a mesh axis, all arrays do after this call.

    JAX transposes this function, except inside custom derivative rules. The transpose sums the gradient of each array
    over the axes that were added to this array.
    """
    return varying_like(arrays, arrays)


def varying_like(carry: _Tree, arrays: Any) -> _Tree:
    """Make ``carry`` vary over the manual mesh axes of ``arrays``; inside ``jax.shard_map``, scans require this."""
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
    """Return the abstract types of results that lie on the same devices as ``array``.

    The results have the mesh of ``array`` and, inside ``jax.shard_map``, vary over the same mesh axes. In their
    shardings, the entry of every dimension is ``None``, because the results, like the operands, are not sharded over
    explicit axes.

    Args:
        array: The array, or its abstract type.
        *types: Shape and element type of each result.
    """
    like = array if isinstance(array, jax.core.ShapedArray) else jax.typeof(array)
    whole = [like.sharding.update(spec=PartitionSpec(*[None] * len(shape))) for shape, _ in types]
    return [
        like.update(shape=tuple(shape), dtype=np.dtype(dtype), sharding=sharding)
        for (shape, dtype), sharding in zip(types, whole, strict=True)
    ]
