"""Passes that overlap computation with halo exchange, and the decision whether a pass does so.

A *slab* is the keys of a halo that come from one device. A pass has several steps:

- In the first step, a device attends with all of its queries to its local keys, while the first slab travels.
- In each later step, the device attends to one slab with the queries that see it, while the next slab travels.

In a forward pass, each later step merges its output with the output of the earlier steps, using their logsumexps. In a
backward pass, each step uses the logsumexp over all keys, and the gradients of all steps are added.

XLA starts an exchange as soon as its operands exist, and waits for the exchange before the first read of its result.
Optimization barriers enforce the order: a slab is cut out before the computation that overlaps its exchange, and it is
read after this computation. On GPUs the barriers persist until XLA has scheduled the program.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from natten_jax.arrays.boxes import QueryBox, elements_of, words_of
from natten_jax.arrays.operands import Cotangents, Gradients, Inputs, Operands, Saved, roles_of_fields
from natten_jax.cost_model.halos import profitable_overlap
from natten_jax.halo import Halo, travel_order
from natten_jax.plan.plan import Plan, Request
from natten_jax.problem import Problem
from natten_jax.sharding.halos.exchange import FIRST_TOKEN_AXIS, DeviceLine, Exchange, add_edges, moves_of, opaque_index

_Tree = TypeVar("_Tree")

#: XLA combines several exchanges into one if they have at most this number of bytes in total.
_COMBINED_BYTES = 30 << 20


class Slab(NamedTuple):
    """Position of a halo slab, and the queries that see it.

    Attributes:
        dimension: Token dimension along which the slab is exchanged.
        number: Index of the slab among the slabs of this dimension.
        keys: Extent of the slab along this dimension, in keys.
        first_key: Coordinates of the slab's first key, relative to the device's first token.
        query_box: Local queries that see the slab.
    """

    dimension: int
    number: int
    keys: int
    first_key: Sequence[Any]
    query_box: QueryBox


def slabs_of(problem: Problem, exchange: Exchange) -> list[Slab]:
    """Return all slabs in the order of their exchanges."""
    slabs: list[Slab] = []
    # Coordinates of the next slab's first key. The slab includes the halos of dimensions with earlier exchanges.
    first_keys: list[Any] = [0] * len(exchange.halos)
    layout = [halo.part for halo in exchange.halos]
    for i in travel_order(exchange.halos):
        halo, line = _along(exchange, i)
        for number, slab in enumerate(halo.seen_slabs(problem.axes[i])):
            is_front = line.index != 0 if slab.is_front is None else slab.is_front
            sides = (slab.starts(halo.part, side) for side in (True, False))
            first_query, first_key = (jnp.where(is_front, *each) for each in zip(*sides, strict=True))
            first = jnp.stack(_with([jnp.zeros((), jnp.int32)] * len(layout), i, opaque_index(first_query)))
            query_box = QueryBox(first, tuple(_with(layout, i, slab.queries)))
            slabs.append(Slab(i, number, slab.keys, _with(first_keys, i, first_key), query_box))
        first_keys[i] = jnp.where(line.index == 0, 0, -halo.before) if halo.changes_places else -halo.before
    return slabs


class HaloPipeline:
    """Pipelined exchange of keys and values: a slab travels while the device attends to the previous slab.

    XLA runs one exchange at a time. So the first slab travels while the device processes the local keys. The second
    slab travels while the device processes the first slab, and so on. The slabs of keys and of values travel together.
    If possible, slabs are cut as arrays of 32-bit words (:func:`natten_jax.arrays.boxes.words_of`).
    """

    def __init__(self, slabs: Sequence[Slab], exchange: Exchange, operands: Operands) -> None:
        self.slabs = slabs
        self._exchange = exchange
        self._next = 0
        self._edge = self._next_edge()
        self._dtypes = operands.inputs.key.dtype, operands.inputs.value.dtype
        self._patchworks = [_Patchwork(words_of(operands.inputs.key)), _Patchwork(words_of(operands.inputs.value))]
        self._arriving: list[jax.Array] = []

    def started_before(self, arrays: _Tree) -> tuple[_Tree, QueryBox | None]:
        """Start the exchange of the next slab, if there is one.

        Computations on the returned arrays start after the slab has been cut out. An exchange between GPUs is a kernel
        that needs SMs and waits for the same kernel on other devices. The kernels of a pass occupy all SMs. So on every
        device the exchange must start before the pass. If the exchange starts late on one device, the exchange kernels
        of other devices occupy SMs until the pass on this device ends. A pass of 19 milliseconds then took 21.

        The exchange starts 2 to 3 microseconds after its data is ready. To delay its kernels by this time, the pass
        should first run a small operation on the returned arrays.

        Args:
            arrays: Inputs of the computation that overlaps the exchange.

        Returns:
            The arrays, and the queries that see the slab (``None`` if there is no next slab).
        """
        if self._next == len(self.slabs):
            return arrays, None
        slab = self.slabs[self._next]
        move = moves_of(*_along(self._exchange, slab.dimension))[slab.number]
        sent, query_box, arrays = jax.lax.optimization_barrier((self._sent(slab), slab.query_box, arrays))
        self._arriving = [move.send(array) for array in sent]
        return arrays, query_box

    def finished_after(self, result: _Tree) -> tuple[list[jax.Array], _Tree]:
        """Wait for ``result`` and then for the exchange; return the slabs of keys and of values, and the result."""
        dimension = self.slabs[self._next].dimension
        self._next += 1
        waiting = self._arriving, self._next_edge(), result
        arrived, self._edge, result = jax.lax.optimization_barrier(waiting)
        slabs = list(arrived) if len(arrived) == 2 else [arrived[0][i] for i in range(2)]
        pairs = zip(self._patchworks, slabs, strict=True)
        self._patchworks = [each.with_slab(dimension, slab) for each, slab in pairs]
        return list(map(elements_of, slabs, self._dtypes)), result

    def _next_edge(self) -> jax.Array | None:
        if self._next == len(self.slabs):
            return None
        slab = self.slabs[self._next]
        return jnp.asarray(moves_of(*_along(self._exchange, slab.dimension))[slab.number].edge, jnp.int32)

    def _sent(self, slab: Slab) -> list[jax.Array]:
        """Return the arrays to send: a slab of keys and a slab of values, or one array in which both are stacked."""
        assert self._edge is not None
        first, other = arrays = [each.sent(slab, self._edge, self._exchange) for each in self._patchworks]
        are_alike = first.shape == other.shape and first.dtype == other.dtype
        if not are_alike or first.nbytes + other.nbytes <= _COMBINED_BYTES:
            return arrays
        return [_stacked(arrays)]


@dataclasses.dataclass(frozen=True)
class _Patchwork:
    """Local keys or values, and their halos as separate arrays. The arrays are only joined in slabs that are sent.

    Attributes:
        local: Local keys or values.
        layers: Received slabs of each dimension, in the order of the exchanges. Each slab includes the halos of the
            dimensions whose exchanges came earlier.
    """

    local: jax.Array
    layers: Mapping[int, tuple[jax.Array, ...]] = dataclasses.field(default_factory=dict)

    def sent(self, slab: Slab, edge: jax.Array, exchange: Exchange) -> jax.Array:
        """Cut out the slab that is sent to another device, including the halos of dimensions with earlier exchanges.

        Along ``slab.dimension``, the slab starts at ``edge``.
        """
        axis = FIRST_TOKEN_AXIS + slab.dimension

        def cut(array: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(array, edge, slab.keys, axis)

        result = cut(self.local)
        for dimension, slabs in self.layers.items():
            if dimension != slab.dimension:
                across = FIRST_TOKEN_AXIS + dimension
                result = _surrounded(result, list(map(cut, slabs)), across, *_along(exchange, dimension))
        return result

    def with_slab(self, dimension: int, slab: jax.Array) -> _Patchwork:
        slabs = *self.layers.get(dimension, ()), slab
        return dataclasses.replace(self, layers={**self.layers, dimension: slabs})


def returned(exchange: Exchange, slabs: Sequence[Slab], array: jax.Array, gradients: Sequence[jax.Array]) -> jax.Array:
    """Send the gradients of halos back to the devices that own the tokens, and add them to the gradients there.

    Args:
        exchange: Exchange that delivered the halos.
        slabs: Slabs of the halos.
        array: Local keys or values.
        gradients: The gradient of ``array``, followed by the gradient of each slab.
    """
    (dimension, *more_dimensions) = travel_order(exchange.halos)
    if not more_dimensions:
        local, *halo_gradients = gradients
        return add_edges(local, halo_gradients, moves_of(*_along(exchange, dimension)), FIRST_TOKEN_AXIS + dimension)

    def exchanged(local: jax.Array) -> list[jax.Array]:
        patchwork, parts = _Patchwork(local), [local]
        for each in slabs:
            move = moves_of(*_along(exchange, each.dimension))[each.number]
            parts.append(move.send(patchwork.sent(each, jnp.asarray(move.edge, jnp.int32), exchange)))
            patchwork = patchwork.with_slab(each.dimension, parts[-1])
        return parts

    (result,) = jax.vjp(exchanged, array)[1](list(gradients))
    return result  # type: ignore[no-any-return]


def _along(exchange: Exchange, dimension: int) -> tuple[Halo, DeviceLine]:
    line = exchange.lines[dimension]
    assert line is not None
    return exchange.halos[dimension], line


def _stacked(arrays: Sequence[jax.Array]) -> jax.Array:
    """Stack arrays of equal shape.

    Each array is written into an uninitialized result, at an index that XLA does not know. For 2 x 177 MB on an H200,
    this takes 0.21 milliseconds. If XLA recognizes that the writes are a concatenation, they take 0.42 milliseconds.
    """
    buffer = jax.lax.empty((len(arrays), *arrays[0].shape), arrays[0].dtype)
    for i, array in enumerate(arrays):
        buffer = jax.lax.dynamic_update_slice_in_dim(buffer, array[None], opaque_index(i), 0)
    return buffer


def _surrounded(local: jax.Array, slabs: Sequence[jax.Array], axis: int, halo: Halo, line: DeviceLine) -> jax.Array:
    """Join tokens with their halos along an axis."""
    if halo.changes_places:
        in_front, behind = (jnp.concatenate(order, axis) for order in ([*slabs, local], [local, *slabs]))
        return jnp.where(line.index == 0, behind, in_front)
    count = len(halo.slabs(halo.before))
    return jnp.concatenate([*slabs[:count][::-1], local, *slabs[count:]], axis)


def _with(numbers: Sequence[Any], dimension: int, number: Any) -> list[Any]:
    return [*numbers[:dimension], number, *numbers[dimension + 1 :]]


#: Functions that run a forward pass or a backward pass on a subset of the queries and keys of a device.
RunForward = Callable[[Request, Operands], Saved]
RunBackward = Callable[[Request, Operands, Saved, Cotangents], Gradients]
#: Function that continues a forward pass from its saved results: it processes more keys for a box of the queries.
ContinueForward = Callable[[Request, Operands, Saved, QueryBox], Saved]


def overlaps_exchange(plan: Plan, request: Request, exchange: Exchange, *, has_sinks: bool = False) -> bool:
    """Return True if a pass overlaps computation with the halo exchange.

    Passes with a key bias or with sinks do not overlap them. Passes on 8-bit arrays do not either, because the outputs
    of such passes are not merged.
    """
    if has_sinks or request.problem.key_bias or request.problem.element.is_float8:
        return False
    return profitable_overlap(plan, tuple(exchange.halos)) is not None


def forward(
    run: RunForward, resume: ContinueForward, request: Request, exchange: Exchange, operands: Operands
) -> Saved:
    """Run the forward pass of a device: on its local keys while halos travel, then on the halos.

    Additional keys are processed with the local keys.

    Args:
        run: Function that runs the pass on a subset of the keys.
        resume: Function that continues the pass on other keys, and merges the results.
        request: Request with the global token layout, and with the batch and heads of this device.
        exchange: Exchange of the halos. ``is_gathered`` is False for every halo.
        operands: Local operands, without origins.
    """
    travel = HaloPipeline(slabs_of(request.problem, exchange), exchange, operands)
    (query, zero), query_box = travel.started_before((operands.inputs.query, jnp.zeros((), jnp.int32)))
    saved = run(request, operands.with_origins(_own_origins(exchange, zero), query=query))
    for slab in travel.slabs:
        (key, value), saved = travel.finished_after(saved)
        assert query_box is not None
        (saved, zero), next_box = travel.started_before((saved, zero))
        origins = exchange.origins_of([zero] * len(exchange.halos), slab.first_key)
        saved = resume(*_slab_call(request, operands, origins, query=query, key=key, value=value), saved, query_box)
        query_box = next_box
    return saved


def backward(
    run: RunBackward, request: Request, exchange: Exchange, operands: Operands, saved: Saved, cotangents: Cotangents
) -> Gradients:
    """Run the backward pass of a device: on its local keys while halos travel, then on the halos.

    The saved logsumexp covers all keys. So the gradients from subsets of the keys can be added. A query gradient is the
    sum over these subsets. The gradient of a key or value is the sum over the devices whose queries see it. Additional
    keys are processed with the local keys.

    Args:
        run: Function that runs the pass on a subset of the keys.
        request: Request with the global token layout, and with the batch and heads of this device.
        exchange: Exchange of the halos. ``is_gathered`` is False for every halo.
        operands: Local operands, without origins.
        saved: Saved results of the forward pass.
        cotangents: The cotangents of output and logsumexp.
    """
    travel = HaloPipeline(slabs_of(request.problem, exchange), exchange, operands)
    query_arrays = operands.inputs.query, saved, cotangents
    (query, saved, cotangents), next_queries = _started_and_cut(travel, query_arrays, query_arrays)
    part = run(request, operands.with_origins(_own_origins(exchange, 0), query=query), saved, cotangents)
    results: list[Gradients] = []
    for slab in travel.slabs:
        (key, value), part = travel.finished_after(part)
        results.append(part)
        assert next_queries is not None
        (query, saved, cotangents), next_queries = _started_and_cut(travel, next_queries, query_arrays)
        origins = exchange.origins_of(slab.query_box.starts, slab.first_key)
        part = run(*_slab_call(request, operands, origins, query=query, key=key, value=value), saved, cotangents)
    local, *halo_gradients = [*results, part]
    query_gradient = local.query
    for slab, gradients in zip(travel.slabs, halo_gradients, strict=True):
        query_gradient = slab.query_box.update(query_gradient, slab.query_box.cut(query_gradient) + gradients.query)
    key = returned(exchange, travel.slabs, operands.inputs.key, [local.key, *(each.key for each in halo_gradients)])
    value = returned(
        exchange, travel.slabs, operands.inputs.value, [local.value, *(each.value for each in halo_gradients)]
    )
    sums = [
        functools.reduce(jnp.add, each) if role.is_of_heads and each[0] is not None else each[0]
        for role, each in zip(roles_of_fields(Inputs), zip(local, *halo_gradients, strict=True), strict=True)
    ]
    return Gradients._make(sums)._replace(query=query_gradient, key=key, value=value)


def _started_and_cut(travel: HaloPipeline, arrays: _Tree, query_arrays: _Tree) -> tuple[_Tree, _Tree | None]:
    """Start the exchange of the next slab, and copy the rows of the queries that see this slab.

    Computations on the returned ``arrays`` start after the copies. The rows of every array in ``query_arrays`` are
    copied. Without a next slab, ``None`` is returned instead of the copies.
    """
    arrays, query_box = travel.started_before(arrays)
    if query_box is None:
        return arrays, None
    cut: _Tree = jax.tree.map(query_box.copied, query_arrays)
    arrays, cut = jax.lax.optimization_barrier((arrays, cut))
    return arrays, cut


def _own_origins(exchange: Exchange, zero: Any) -> jax.Array:
    """Return the origins of a device's local queries and keys, int32 ``[2, 3]``.

    ``zero`` is 0, or an array that contains 0. The origins are computed after this array.
    """
    zeros = [zero] * len(exchange.halos)
    return exchange.origins_of(zeros, zeros)


def _slab_call(
    request: Request, operands: Operands, origins: jax.Array, **arrays: jax.Array
) -> tuple[Request, Operands]:
    """Return the request and the operands of a step on one slab; they contain no additional keys."""
    problem = dataclasses.replace(request.problem, additional_kv=0)
    placed = operands.with_origins(origins, **arrays, additional_keys=None, additional_values=None)
    return dataclasses.replace(request, problem=problem), placed
