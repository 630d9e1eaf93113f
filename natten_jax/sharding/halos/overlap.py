"""Passes that compute while halos of keys and values arrive, slab by slab, and the choice of the passes that do so.

A device attends with all of its queries to the keys that it holds while others travel, and then to each slab of halos
with the queries that see it, while the next slab travels. Each forward pass continues the one before: outputs are
merged by their logsumexp. In backward passes the logsumexp covers all keys, and gradients add up.

XLA starts an exchange once its operands exist, and waits for it where the first result is read. Optimization barriers
keep the order: a slab is cut before a computation and read after it. On GPUs they last until the program is scheduled.
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
from natten_jax.cost_model.halos import overlap_that_pays
from natten_jax.halo import Halo, travel_order
from natten_jax.plan.plan import Plan, Request
from natten_jax.problem import Problem
from natten_jax.sharding.halos.exchange import FIRST_TOKEN_AXIS, DeviceLine, Exchange, moves_of, unknown, with_edges

_Tree = TypeVar("_Tree")

#: XLA makes one exchange of several that have no more bytes than this together.
_COMBINED_BYTES = 30 << 20


class Slab(NamedTuple):
    """Where a slab of halos lies, and the queries that see it.

    Attributes:
        dimension: Along which it lies beside the device's tokens.
        number: The number of the dimension's slabs.
        keys: How many it has, along that dimension.
        first_key: Where it begins, by token dimension, counted from the device's first token.
        seeing: The queries that see it.
    """

    dimension: int
    number: int
    keys: int
    first_key: Sequence[Any]
    seeing: QueryBox


def slabs_of(problem: Problem, exchange: Exchange) -> list[Slab]:
    """All slabs, in the order in which they travel."""
    found: list[Slab] = []
    first_keys: list[Any] = [0] * len(exchange.halos)  # that the device has, with the halos of the dimensions so far
    layout = [halo.part for halo in exchange.halos]
    for i in travel_order(exchange.halos):
        halo, line = _along(exchange, i)
        for number, slab in enumerate(halo.seen_slabs(problem.axes[i])):
            is_front = line.place != 0 if slab.is_front is None else slab.is_front
            sides = (slab.starts(halo.part, side) for side in (True, False))
            first_query, first_key = (jnp.where(is_front, *each) for each in zip(*sides, strict=True))
            first = jnp.stack(_with([jnp.zeros((), jnp.int32)] * len(layout), i, unknown(first_query)))
            seeing = QueryBox(first, tuple(_with(layout, i, slab.queries)))
            found.append(Slab(i, number, slab.keys, _with(first_keys, i, first_key), seeing))
        first_keys[i] = jnp.where(line.place == 0, 0, -halo.before) if halo.changes_places else -halo.before
    return found


class HaloPipeline:
    """The exchange of keys and values, a slab while the one before is attended to.

    XLA has one exchange on its way at a time. So the first one travels while a device's own keys run, the second while
    the first slab does, and so on; and a slab of keys goes with that of values. What is cut is cut in words.
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
        """Start to bring the next slab, if there is one.

        What is computed of the returned values comes after that. An exchange between GPUs is a kernel that waits for
        the others, and wants multiprocessors of which kernels of passes leave none. So it must start before these on
        every device: else it keeps some of another device's busy until they are done here, which made a pass of 19
        milliseconds last 21. It starts 2 to 3 microseconds after what it sends is there: something small that a pass
        needs should be computed of these values first.

        Args:
            arrays: What something is computed with meanwhile.

        Returns:
            The same, and the queries that see the slab.
        """
        if self._next == len(self.slabs):
            return arrays, None
        slab = self.slabs[self._next]
        move = moves_of(*_along(self._exchange, slab.dimension))[slab.number]
        sent, seeing, arrays = jax.lax.optimization_barrier((self._sent(slab), slab.seeing, arrays))
        self._arriving = [move.there(array) for array in sent]
        return arrays, seeing

    def finished_after(self, result: _Tree) -> tuple[list[jax.Array], _Tree]:
        """Wait until something is computed, which is returned, and then for a slab: that of keys, that of values."""
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
        """What another device needs: of keys and of values, or of both together."""
        assert self._edge is not None
        first, other = arrays = [each.sent(slab, self._edge, self._exchange) for each in self._patchworks]
        are_alike = first.shape == other.shape and first.dtype == other.dtype
        if not are_alike or first.nbytes + other.nbytes <= _COMBINED_BYTES:
            return arrays
        return [_stacked(arrays)]


@dataclasses.dataclass(frozen=True)
class _Patchwork:
    """Keys or values and their halos, which are never joined but for what travels on.

    Attributes:
        own: What the device has.
        layers: Slabs by dimension, in the order in which they travel: they reach over the halos of all layers before.
    """

    own: jax.Array
    layers: Mapping[int, tuple[jax.Array, ...]] = dataclasses.field(default_factory=dict)

    def sent(self, slab: Slab, edge: jax.Array, exchange: Exchange) -> jax.Array:
        """What another device needs as this slab, from an edge on, halos of the dimensions before included."""
        axis = FIRST_TOKEN_AXIS + slab.dimension

        def cut(array: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(array, edge, slab.keys, axis)

        result = cut(self.own)
        for dimension, slabs in self.layers.items():
            if dimension != slab.dimension:
                across = FIRST_TOKEN_AXIS + dimension
                result = _surrounded(result, list(map(cut, slabs)), across, *_along(exchange, dimension))
        return result

    def with_slab(self, dimension: int, slab: jax.Array) -> _Patchwork:
        """With one more."""
        slabs = *self.layers.get(dimension, ()), slab
        return dataclasses.replace(self, layers={**self.layers, dimension: slabs})


def returned(exchange: Exchange, slabs: Sequence[Slab], array: jax.Array, gradients: Sequence[jax.Array]) -> jax.Array:
    """Gradients of a device's own keys or values and of its halos, added where these come from.

    Args:
        exchange: What brought them.
        slabs: Slabs of the halos.
        array: The device's own keys or values.
        gradients: Gradients of these, and of each halo.
    """
    (dimension, *others) = travel_order(exchange.halos)
    if not others:
        own, *of_halos = gradients
        return with_edges(own, of_halos, moves_of(*_along(exchange, dimension)), FIRST_TOKEN_AXIS + dimension)

    def exchanged(own: jax.Array) -> list[jax.Array]:
        patchwork, found = _Patchwork(own), [own]
        for each in slabs:
            move = moves_of(*_along(exchange, each.dimension))[each.number]
            found.append(move.there(patchwork.sent(each, jnp.asarray(move.edge, jnp.int32), exchange)))
            patchwork = patchwork.with_slab(each.dimension, found[-1])
        return found

    (result,) = jax.vjp(exchanged, array)[1](list(gradients))
    return result  # type: ignore[no-any-return]


def _along(exchange: Exchange, dimension: int) -> tuple[Halo, DeviceLine]:
    line = exchange.lines[dimension]
    assert line is not None
    return exchange.halos[dimension], line


def _stacked(arrays: Sequence[jax.Array]) -> jax.Array:
    """Arrays of one shape as one.

    Each is put where it belongs: 0.21 milliseconds for 2 x 177 MB on an H200, and 0.42 where XLA sees that they are
    joined.
    """
    room = jax.lax.empty((len(arrays), *arrays[0].shape), arrays[0].dtype)
    for i, array in enumerate(arrays):
        room = jax.lax.dynamic_update_slice_in_dim(room, array[None], unknown(i), 0)
    return room


def _surrounded(own: jax.Array, slabs: Sequence[jax.Array], axis: int, halo: Halo, line: DeviceLine) -> jax.Array:
    """Tokens between their halos along an axis."""
    if halo.changes_places:
        in_front, behind = (jnp.concatenate(order, axis) for order in ([*slabs, own], [own, *slabs]))
        return jnp.where(line.place == 0, behind, in_front)
    count = len(halo.slabs(halo.before))
    return jnp.concatenate([*slabs[:count][::-1], own, *slabs[count:]], axis)


def _with(numbers: Sequence[Any], dimension: int, number: Any) -> list[Any]:
    return [*numbers[:dimension], number, *numbers[dimension + 1 :]]


#: Run a forward pass, or a backward pass, on some of a device's queries and keys.
RunForward = Callable[[Request, Operands], Saved]
RunBackward = Callable[[Request, Operands, Saved, Cotangents], Gradients]
#: Run a forward pass on more keys, for some of the queries, after one that saved what is given.
ContinueForward = Callable[[Request, Operands, Saved, QueryBox], Saved]


def computes_meanwhile(plan: Plan, request: Request, exchange: Exchange, *, has_sinks: bool = False) -> bool:
    """Return True if a pass computes while halos travel.

    A pass with a key bias or sinks does not, and neither does a pass on 8-bit arrays, whose outputs are not merged.
    """
    if has_sinks or request.problem.key_bias or request.problem.element.is_float8:
        return False
    return overlap_that_pays(plan, tuple(exchange.halos)) is not None


def forward(
    run: RunForward, run_on: ContinueForward, request: Request, exchange: Exchange, operands: Operands
) -> Saved:
    """A forward pass of all queries that a device has: with its own keys while halos travel, then with these.

    Additional keys go with the device's own.

    Args:
        run: Runs the pass on some of the keys.
        run_on: Runs it on others, and merges the results.
        request: The whole call, with the device's batch and heads.
        exchange: What brings the halos, none of which are gathered.
        operands: What the device has, without origins.
    """
    travel = HaloPipeline(slabs_of(request.problem, exchange), exchange, operands)
    (query, nothing), seeing = travel.started_before((operands.inputs.query, jnp.zeros((), jnp.int32)))
    found = run(request, operands.placed(_own_origins(exchange, nothing), query=query))
    for slab in travel.slabs:
        (key, value), found = travel.finished_after(found)
        assert seeing is not None
        (found, nothing), seeing_next = travel.started_before((found, nothing))
        origins = exchange.origins_of([nothing] * len(exchange.halos), slab.first_key)
        found = run_on(*_of_halo(request, operands, origins, query=query, key=key, value=value), found, seeing)
        seeing = seeing_next
    return found


def backward(
    run: RunBackward, request: Request, exchange: Exchange, operands: Operands, saved: Saved, cotangents: Cotangents
) -> Gradients:
    """The gradients of all that a device has: by its own keys while halos travel, then by these.

    The logsumexp being that of all keys, gradients by some keys add up: the query's over all of them, and those of
    keys and values over the devices whose queries see them. Additional keys go with the device's own.

    Args:
        run: Runs the pass on some of the keys.
        request: The whole call, with the device's batch and heads.
        exchange: What brings the halos, none of which are gathered.
        operands: What the device has, without origins.
        saved: What the forward pass saved.
        cotangents: The cotangents of output and logsumexp.
    """
    travel = HaloPipeline(slabs_of(request.problem, exchange), exchange, operands)
    of_queries = operands.inputs.query, saved, cotangents
    (query, saved, cotangents), seen_next = _started_and_cut(travel, of_queries, of_queries)
    found = run(request, operands.placed(_own_origins(exchange, 0), query=query), saved, cotangents)
    results: list[Gradients] = []
    for slab in travel.slabs:
        (key, value), found = travel.finished_after(found)
        results.append(found)
        assert seen_next is not None
        (query, saved, cotangents), seen_next = _started_and_cut(travel, seen_next, of_queries)
        origins = exchange.origins_of(slab.seeing.starts, slab.first_key)
        found = run(*_of_halo(request, operands, origins, query=query, key=key, value=value), saved, cotangents)
    own, *of_halos = [*results, found]
    of_query = own.query
    for slab, gradients in zip(travel.slabs, of_halos, strict=True):
        of_query = slab.seeing.put(of_query, slab.seeing.cut(of_query) + gradients.query)
    key = returned(exchange, travel.slabs, operands.inputs.key, [own.key, *(each.key for each in of_halos)])
    value = returned(exchange, travel.slabs, operands.inputs.value, [own.value, *(each.value for each in of_halos)])
    sums = [
        functools.reduce(jnp.add, each) if role.is_of_heads and each[0] is not None else each[0]
        for role, each in zip(roles_of_fields(Inputs), zip(own, *of_halos, strict=True), strict=True)
    ]
    return Gradients._make(sums)._replace(query=of_query, key=key, value=value)


def _started_and_cut(travel: HaloPipeline, arrays: _Tree, of_queries: _Tree) -> tuple[_Tree, _Tree | None]:
    """Start to bring the next slab, and cut the queries that see it before anything is computed of ``arrays``."""
    arrays, seeing = travel.started_before(arrays)
    if seeing is None:
        return arrays, None
    cut: _Tree = jax.tree.map(seeing.copied, of_queries)
    arrays, cut = jax.lax.optimization_barrier((arrays, cut))
    return arrays, cut


def _own_origins(exchange: Exchange, nothing: Any) -> jax.Array:
    """Origins (int32 ``[2, rank]``) of a device's own queries and keys; ``nothing`` is zero."""
    zeros = [nothing] * len(exchange.halos)
    return exchange.origins_of(zeros, zeros)


def _of_halo(request: Request, operands: Operands, origins: jax.Array, **arrays: jax.Array) -> tuple[Request, Operands]:
    """The request and operands of a slab of keys and values, without additional keys."""
    problem = dataclasses.replace(request.problem, additional_kv=0)
    placed = operands.placed(origins, **arrays, additional_keys=None, additional_values=None)
    return dataclasses.replace(request, problem=problem), placed
