"""Additional passes over strips of wrapped keys, and the merge of forward passes over disjoint sets of keys.

Kernels without support for ``edges="wrap"`` first run with ``edges="cut"``. Windows then lack their wrapped keys. The
wrapped keys beyond one end of a dimension are called a *strip*. An additional pass runs over each strip, and its
results are merged with the results of the earlier passes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from natten_jax import backends
from natten_jax.arrays.boxes import QueryBox, unfused
from natten_jax.arrays.operands import Gradients, Operands, Saved, key_arrays
from natten_jax.arrays.remainders import base2, pack_remainder, unpack_remainder
from natten_jax.native.module import KERNEL_RANK, box_start
from natten_jax.plan.plan import Plan
from natten_jax.windows import Axis


def merged(one: Saved, other: Saved) -> Saved:
    """Merge the saved results of forward passes over two disjoint sets of keys.

    The weight of a pass is ``exp2(logsumexp - largest)``, where ``largest`` is the larger logsumexp of the two passes.
    Both logsumexps are exact and in base 2. The exact logsumexp is the rounded product of the returned logsumexp and
    ``log2(e)``, plus the remainder (:mod:`natten_jax.arrays.remainders`). A query that sees no key in either pass has a
    zero output and a logsumexp of ``-inf``.
    """
    assert one.remainder is not None and other.remainder is not None
    first, second = base2(one.logsumexp), base2(other.logsumexp)
    parts = unpack_remainder(one.remainder), unpack_remainder(other.remainder)
    highest = jnp.maximum(first, second)
    highest = jnp.where(jnp.isneginf(highest), 0, highest)
    distances = (first - highest) + parts[0][0], (second - highest) + parts[1][0]
    # If logits are large, the remainders in these distances can be large and positive. Subtracting the larger
    # distance keeps weights from overflowing.
    top = jnp.maximum(*distances)
    top = jnp.where(jnp.isneginf(top), 0, top)
    weights = [jnp.exp2((distance - top) + log2_sum) for distance, (_, log2_sum) in zip(distances, parts, strict=True)]
    total = weights[0] + weights[1]
    log2_total = jnp.log2(total)
    logsumexp = (highest + (top + log2_total)) * np.asarray(math.log(2), total.dtype)
    remainder = jnp.where(total == 0, 0, pack_remainder((highest - base2(logsumexp)) + top, log2_total))
    share = jnp.where(total == 0, 0, weights[1] / total)[..., None]
    out = one.out.astype(total.dtype) * (1 - share) + other.out.astype(total.dtype) * share
    return Saved(out.astype(one.out.dtype), logsumexp, remainder)


def continued(forward_saving: Callable[[Operands], Saved], operands: Operands, saved: Saved, box: QueryBox) -> Saved:
    """Continue a forward pass with further keys: run a pass over these keys, and merge its results.

    Args:
        forward_saving: Function that runs a forward pass.
        operands: All queries, and the further keys, which only the queries in ``box`` see. ``origins`` is not
            ``None``.
        saved: Saved results of earlier passes, for all queries.
        box: Box of the queries that see the further keys.
    """
    assert operands.origins is not None
    query = box.copied(operands.inputs.query)
    part = forward_saving(operands.with_origins(with_start_of(box, operands.origins), query=query))
    both = merged(jax.tree.map(box.cut, saved), part)
    result: Saved = jax.tree.map(box.update, saved, both)
    return result


def with_start_of(box: QueryBox, origins: jax.Array) -> jax.Array:
    """Move the query origin to the first query of a box. The key origin stays the same."""
    start = box_start(box)
    return origins + jnp.stack([start, jnp.zeros_like(start)])


_FIRST_TOKEN_AXIS = 1  # after the batch axis


def are_needed(plan: Plan, operands: Operands) -> bool:
    """Return True if strips are needed: the kernels cannot wrap, or the arrays contain only a part of the layout."""
    backend = backends.by_id(plan.backend)
    if not backend.capabilities.wraps_by_strips:
        return False
    layouts = (array.shape[1:-2] for array in (operands.inputs.query, operands.inputs.key))
    are_at_hand = all(
        queries == keys == axis.kv_extent
        for axis, queries, keys in zip(plan.problem.axes, *layouts, strict=True)
        if axis.edges == "wrap"
    )
    return not (are_at_hand and backend.form(plan).wraps)


def without_strips(plan: Plan, operands: Operands) -> tuple[Plan, Operands]:
    """Return plan and operands of the first pass, in which windows lack the keys of the strips.

    Windows are cut at the ends of the dimensions that have strips. Other wrapped dimensions are split over devices, and
    their wrapped keys are in the device's halos. These dimensions are extended (:func:`unwrapped`).
    """
    pairs = zip(plan.problem.edges, _are_whole(plan, operands), strict=True)
    edges = ["cut" if is_whole else edge for edge, is_whole in pairs]
    plan = dataclasses.replace(plan, problem=plan.problem.with_axes(edges=edges))
    return unwrapped(plan, operands) if "wrap" in plan.problem.edges else (plan, operands)


def unwrapped(plan: Plan, operands: Operands) -> tuple[Plan, Operands]:
    """Replace wrapped dimensions with longer dimensions and ``edges="shift"``, without changing any window.

    A longer dimension has unused positions before and after the layout. No window reaches the ends of the longer
    dimension, so no window is shifted.
    """
    axes = plan.problem.axes
    margins = [_margin(axis) if axis.edges == "wrap" else 0 for axis in axes]
    longer: dict[str, list[Any]] = {
        name: [getattr(axis, name) + 2 * margin for axis, margin in zip(axes, margins, strict=True)]
        for name in ("query_extent", "kv_extent")
    }
    longer["edges"] = ["shift" if axis.edges == "wrap" else axis.edges for axis in axes]
    shift = np.array([[0] * (KERNEL_RANK - len(margins)) + margins], np.int32)
    origins = jnp.zeros((2, KERNEL_RANK), jnp.int32) if operands.origins is None else operands.origins
    plan = dataclasses.replace(plan, problem=plan.problem.with_axes(**longer))
    return plan, operands._replace(origins=origins + shift)


class Side(NamedTuple):
    """Wrapped keys beyond one end of a dimension.

    Attributes:
        first: Index of the first of these keys in the layout.
        keys: Number of these keys.
        origin: Coordinate at which windows reach the first of these keys: ``-keys`` if the keys lie before the layout,
            the extent of the dimension if they lie after it.
        first_query: Index of the first query that sees at least one of these keys.
        queries: Number of queries from ``first_query`` to the last query that sees at least one of these keys.
    """

    first: int
    keys: int
    origin: int
    first_query: int
    queries: int


@functools.lru_cache(maxsize=1024)
def sides_of(axis: Axis) -> tuple[Side, ...]:
    """Return the wrapped keys beyond both ends of a dimension. An end that no window crosses is omitted."""
    extent = axis.kv_extent
    near = np.arange(min(extent, (axis.kernel_size + axis.stride) * axis.dilation))
    before, _ = axis.reach(near)
    _, behind = axis.reach(extent - 1 - near)
    in_front, at_back = np.nonzero(before < 0)[0], np.nonzero(behind > extent)[0]
    sides = []
    if in_front.size:
        keys = -int(before.min())
        sides.append(Side(extent - keys, keys, -keys, 0, int(in_front[-1]) + 1))
    if at_back.size:
        queries = int(at_back[-1]) + 1
        sides.append(Side(0, int(behind.max()) - extent, extent, extent - queries, queries))
    return tuple(sides)


@dataclasses.dataclass(frozen=True)
class Strip:
    """Wrapped keys beyond one end of a dimension.

    The strip includes corners: along earlier dimensions, it is padded with the wrapped keys of these dimensions.

    Attributes:
        axes: The token dimensions.
        are_whole: One flag per dimension. True if the dimension wraps and the arrays contain all keys along it.
        dimension: Index of the dimension. The strip lies beyond one end of this dimension.
        side: The keys beyond this end, and the queries that see these keys.
        query_box: Box of the queries that see the strip.
    """

    axes: tuple[Axis, ...]
    are_whole: tuple[bool, ...]
    dimension: int
    side: Side
    query_box: QueryBox

    def gather(self, array: jax.Array) -> jax.Array:
        """Return the keys or values of the strip, with corners, from an array of all keys or values."""
        return self._padded(self._cut(array))

    def scatter_add(self, total: jax.Array, gradient: jax.Array) -> jax.Array:
        """Add the gradient of the strip to the gradient of all keys or values: the transpose of :meth:`gather`."""
        strip = self._cut(total)
        (more,) = jax.linear_transpose(self._padded, strip)(gradient)
        axis = _FIRST_TOKEN_AXIS + self.dimension
        return jax.lax.dynamic_update_slice_in_dim(unfused(total), strip + more, self.side.first, axis)

    def _cut(self, array: jax.Array) -> jax.Array:
        """Return the strip without corners: a slice of an array of all keys or values."""
        first, keys, *_ = self.side
        return jax.lax.slice_in_dim(array, first, first + keys, axis=_FIRST_TOKEN_AXIS + self.dimension)

    def _padded(self, array: jax.Array) -> jax.Array:
        """Pad a slice along the earlier dimensions with the wrapped keys of these dimensions."""
        widths = [(0, 0)] * array.ndim
        for i in self._before():
            widths[_FIRST_TOKEN_AXIS + i] = _padding(self.axes[i])
        return jnp.pad(array, widths, mode="wrap")

    def strip_pass(self, plan: Plan, operands: Operands) -> tuple[Plan, Operands]:
        """Return plan and operands of a pass over the strip, for all queries.

        Additional tokens and sinks are removed, because the first pass includes them.
        """
        origin = [0] * len(self.axes)
        origin[self.dimension] = self.side.origin
        for i in self._before():
            origin[i] = -_padding(self.axes[i])[0]
        shift = np.array([[0] * KERNEL_RANK, [0] * (KERNEL_RANK - len(origin)) + origin], np.int32)
        plan = dataclasses.replace(plan, problem=dataclasses.replace(plan.problem, additional_kv=0))
        plan, operands = unwrapped(plan, operands)
        assert operands.origins is not None
        arrays = {name: self.gather(array) for name, array in key_arrays(operands.inputs).items()}
        removed = dict.fromkeys(("additional_keys", "additional_values", "sinks"))
        return plan, operands.with_origins(operands.origins + shift, **arrays, **removed)

    def add_gradients(self, total: Gradients, gradients: Gradients) -> Gradients:
        """Add the gradients of the strip's keys, values and key biases to the gradients of the whole arrays."""
        new = key_arrays(gradients)
        return total._replace(**{name: self.scatter_add(array, new[name]) for name, array in key_arrays(total).items()})

    def _before(self) -> list[int]:
        return [i for i in range(self.dimension) if self.are_whole[i] and sides_of(self.axes[i])]


def _padding(axis: Axis) -> tuple[int, int]:
    """Return the number of wrapped keys before the start and the number after the end of a dimension."""
    keys = [(side.keys, 0) if side.origin < 0 else (0, side.keys) for side in sides_of(axis)]
    before, after = np.sum(keys, axis=0, dtype=int).tolist()
    return before, after


def strips_of(plan: Plan, operands: Operands) -> Iterator[Strip]:
    """Yield the strips of all dimensions except those whose wrapped keys arrive in halos from other devices."""
    axes, are_whole = plan.problem.axes, _are_whole(plan, operands)
    queries = operands.inputs.query.shape[1:-2]
    for i, axis in enumerate(axes):
        for side in sides_of(axis) if are_whole[i] else ():
            first, extents = np.zeros(len(axes), np.int32), list(queries)
            if queries[i] == axis.query_extent:  # otherwise the position of the queries can be a run-time value
                first[i], extents[i] = side.first_query, side.queries
            yield Strip(axes, are_whole, i, side, QueryBox(jnp.asarray(first), tuple(extents)))


def _are_whole(plan: Plan, operands: Operands) -> tuple[bool, ...]:
    """Return one flag per dimension: True if the dimension wraps and the arrays contain all keys along it."""
    pairs = zip(operands.inputs.key.shape[1:-2], plan.problem.axes, strict=True)
    return tuple(axis.edges == "wrap" and extent == axis.kv_extent for extent, axis in pairs)


def _margin(axis: Axis) -> int:
    """Return the number of tokens to add at each end of a wrapped dimension.

    With these tokens, all windows fit inside the dimension. The number is a multiple of ``stride * dilation``, so that
    the same queries share a window as before.
    """
    step = axis.stride * axis.dilation
    return -(-(axis.kernel_size + axis.stride) * axis.dilation // step) * step
