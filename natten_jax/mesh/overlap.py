"""Passes that compute while halos travel, where token dimensions are split over devices.

Keys are divided: a device runs those that it has with all of its queries while the others travel, and then each halo
with the queries that see it. Forwards the outputs are merged by their logsumexp, where queries see both; backwards,
where the logsumexp is that of all keys, gradients add up.

XLA starts an exchange as soon as its operands are there and waits for it where the first result is read. So all that
has to be said is that slabs are cut before a device's own keys run, and read after it: optimization barriers say so,
which on GPUs last until the program is scheduled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from natten_jax.backends.base import Gradients, Operands, Output, Saved
from natten_jax.halo import Halo
from natten_jax.mesh.exchange import FIRST_TOKEN_AXIS, Exchange
from natten_jax.mesh.line import Line
from natten_jax.mesh.moves import received_from_neighbors, returned_to_neighbors, sent_to_neighbors, unknown
from natten_jax.partial_outputs import merged
from natten_jax.resolve import Request

#: Run a forward pass, or a backward pass, on some of a device's queries and keys.
RunForward = Callable[[Request, Operands], Saved]
RunBackward = Callable[[Request, Operands, Saved, Output], Gradients]
_Tree = TypeVar("_Tree")

#: XLA makes one exchange of several that have no more bytes than this together. It has one on its way at a time: of
#: two, only the second hides behind a device's own keys.
_COMBINED_BYTES = 30 << 20


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Layer:
    """Halos of an array along one token dimension.

    Attributes:
        dimension: Which.
        slabs: In the order of tokens.
    """

    dimension: int = dataclasses.field(metadata={"static": True})
    slabs: list[jax.Array]


@dataclasses.dataclass(frozen=True)
class _Patchwork:
    """Keys or values and their halos, which are never joined but for what travels on.

    Attributes:
        own: What the device has.
        layers: By dimension, in the order in which they travel: they reach over the halos of all layers before.
    """

    own: jax.Array
    layers: tuple[_Layer, ...] = ()

    def sent(self, exchange: Exchange, dimension: int) -> list[jax.Array]:
        """What neighbors along a dimension need, halos that are there included."""
        halo, line = _along(exchange, dimension)
        axis = FIRST_TOKEN_AXIS + dimension
        result = sent_to_neighbors(self.own, halo, line, axis)
        for layer in self.layers:
            of_slabs = zip(*(sent_to_neighbors(slab, halo, line, axis) for slab in layer.slabs), strict=True)
            result = [
                _surrounded(own, slabs, FIRST_TOKEN_AXIS + layer.dimension, *_along(exchange, layer.dimension))
                for own, slabs in zip(result, of_slabs, strict=True)
            ]
        return result

    def with_halos(self, layer: _Layer) -> _Patchwork:
        """With those along another dimension."""
        return dataclasses.replace(self, layers=(*self.layers, layer))


class _Place(NamedTuple):
    """Where a halo lies, and the queries that see it.

    Attributes:
        dimension: Along which it lies beside the device's tokens.
        queries: How many see it, along that dimension.
        first_query: Where these begin among the device's, by token dimension.
        first_key: Where the halo begins, counted likewise.
    """

    dimension: int
    queries: int
    first_query: Sequence[Any]
    first_key: Sequence[Any]

    def cut(self, array: jax.Array) -> jax.Array:
        """These queries of an array."""
        axis = FIRST_TOKEN_AXIS + self.dimension
        return _cut(array, self.first_query, (*array.shape[:axis], self.queries, *array.shape[axis + 1 :]))


def forward(run: RunForward, request: Request, exchange: Exchange, operands: Operands) -> Saved:
    """A forward pass of all queries that a device has: with its own keys while halos travel, then with these.

    Additional keys go with the device's own.

    Args:
        run: Runs the pass on some of the keys.
        request: The whole call, with the device's batch and heads.
        exchange: What brings the halos, none of which are gathered.
        operands: What the device has, without origins.
    """
    places, travel = _places(request, exchange), _Travel(exchange, operands)
    query, seeing = travel.started_before(operands.query, places)
    result = travel.finished_after(run(request, _of_own(exchange, operands, query)))
    for place, of_place, (key, value) in zip(places, seeing, travel.halos(), strict=True):
        found = run(_of_halos(request), _of_halo(exchange, place, of_place, key, value))
        both = merged(jax.tree.map(place.cut, result), found)
        result = jax.tree.map(lambda array, part, place=place: _put(array, part, place.first_query), result, both)
    return result


def backward(
    run: RunBackward, request: Request, exchange: Exchange, operands: Operands, saved: Saved, cotangents: Output
) -> Gradients:
    """The gradients of all that a device has: by its own keys while halos travel, then by these.

    The logsumexp being that of all keys, gradients by some keys add up: the query's over all of them, and those of
    keys and values over the devices whose queries see them. Additional keys go with the device's own.

    Args:
        run: Runs the pass on some of the keys.
        request: The whole call, with the device's batch and heads.
        exchange: What brings the halos, none of which are gathered.
        operands: What the device has, without origins.
        saved: Of the forward pass.
        cotangents: Of output and logsumexp.
    """
    places, travel = _places(request, exchange), _Travel(exchange, operands)
    (query, saved, cotangents), seeing = travel.started_before((operands.query, saved, cotangents), places)
    own = travel.finished_after(run(request, _of_own(exchange, operands, query), saved, cotangents))
    of_query = own.query
    gradients: tuple[list[Any], list[Any]] = ([], [])
    for place, (query, saved, cotangents), slabs in zip(places, seeing, travel.halos(), strict=True):
        found = run(_of_halos(request), _of_halo(exchange, place, query, *slabs), saved, cotangents)
        of_query = _put(of_query, place.cut(of_query) + found.query, place.first_query)
        axis = FIRST_TOKEN_AXIS + place.dimension
        for of_slabs, of_side, gradient in zip(gradients, slabs, (found.key, found.value), strict=True):
            ends = np.cumsum([slab.shape[axis] for slab in of_side])
            of_slabs += jnp.split(gradient, ends[:-1], axis)
    key, value = (
        _returned(exchange, array, of_own, of_slabs)
        for array, of_own, of_slabs in zip(operands[1:3], own[1:3], gradients, strict=True)
    )
    return own._replace(query=of_query, key=key, value=value)


class _Travel:
    """The exchange of keys and values, around what is computed meanwhile.

    Only the halos of one dimension, the largest, travel meanwhile: those of others take along what it brought.
    """

    def __init__(self, exchange: Exchange, operands: Operands) -> None:
        self._exchange = exchange
        self._first, *self._others = exchange.travelling
        self._patchworks = [_Patchwork(operands.key), _Patchwork(operands.value)]

    def started_before(self, arrays: _Tree, places: Sequence[_Place]) -> tuple[_Tree, list[_Tree]]:
        """Start, and cut the queries that see halos; what is computed of the returned arrays comes after that.

        An exchange between GPUs is a kernel that waits for the others, and wants multiprocessors of which kernels of
        passes leave none. So it must start before these on every device: else it keeps some of another device's busy
        until they are done here, which made a pass of 19 milliseconds last 21. Queries are cut meanwhile.
        """
        sent, arrays = jax.lax.optimization_barrier((self._sent(self._first), arrays))
        self._receive(self._first, sent)
        seeing = [jax.tree.map(place.cut, arrays) for place in places]
        arrays, seeing = jax.lax.optimization_barrier((arrays, seeing))
        return arrays, seeing

    def finished_after(self, result: _Tree) -> _Tree:
        """Wait until something is computed, which is returned, and then for all halos."""
        layers = [each.layers for each in self._patchworks]
        layers, result = jax.lax.optimization_barrier((layers, result))
        pairs = zip(self._patchworks, layers, strict=True)
        self._patchworks = [dataclasses.replace(each, layers=of_each) for each, of_each in pairs]
        for dimension in self._others:
            self._receive(dimension, self._sent(dimension))
        return result

    def _sent(self, dimension: int) -> list[list[jax.Array]]:
        """What neighbors need: of keys and of values, or of both together."""
        slabs = [each.sent(self._exchange, dimension) for each in self._patchworks]
        (first, *_), (other, *_) = slabs
        if first.shape != other.shape or first.nbytes + other.nbytes <= _COMBINED_BYTES:
            return slabs
        return [[_stacked(each) for each in zip(*slabs, strict=True)]]

    def _receive(self, dimension: int, sent: Sequence[Sequence[jax.Array]]) -> None:
        arrived = [received_from_neighbors(slabs, *_along(self._exchange, dimension)) for slabs in sent]
        if len(arrived) == 1:
            arrived = [[slab[i] for slab in arrived[0]] for i in range(2)]
        self._patchworks = [
            each.with_halos(_Layer(dimension, slabs)) for each, slabs in zip(self._patchworks, arrived, strict=True)
        ]

    def halos(self) -> list[tuple[Sequence[jax.Array], ...]]:
        """The slabs of keys and of values of each place, in the order of :func:`_places`."""
        keys, values = (
            [
                side
                for layer in each.layers
                for side in _by_side(layer.slabs, _along(self._exchange, layer.dimension)[0])
            ]
            for each in self._patchworks
        )
        return list(zip(keys, values, strict=True))


def _places(request: Request, exchange: Exchange) -> list[_Place]:
    places: list[_Place] = []
    first_keys: list[Any] = [0] * len(exchange.halos)  # that the device has, with the halos of the dimensions so far
    for i in exchange.travelling:
        halo, line = _along(exchange, i)
        for side in halo.sides(request.problem.axes[i]):
            is_front = line.place != 0 if side.is_front is None else side.is_front
            first = jnp.where(is_front, 0, halo.part - side.queries)
            first_query = _with([0] * len(first_keys), i, unknown(first))
            first_key = _with(first_keys, i, jnp.where(is_front, -halo.before, halo.part))
            places.append(_Place(i, side.queries, first_query, first_key))
        first_keys[i] = jnp.where(line.place == 0, 0, -halo.before) if halo.changes_places else -halo.before
    return places


def _of_own(exchange: Exchange, operands: Operands, query: jax.Array) -> Operands:
    nothing = [0] * len(exchange.halos)
    return operands._replace(query=query, origins=exchange.origins_of(nothing, nothing))


def _of_halo(
    exchange: Exchange, place: _Place, query: jax.Array, keys: Sequence[jax.Array], values: Sequence[jax.Array]
) -> Operands:
    key, value = (_joined(each, FIRST_TOKEN_AXIS + place.dimension) for each in (keys, values))
    return Operands(query, key, value, None, None, exchange.origins_of(place.first_query, place.first_key))


def _of_halos(request: Request) -> Request:
    return dataclasses.replace(request, problem=dataclasses.replace(request.problem, additional_kv=0))


def _returned(exchange: Exchange, array: jax.Array, of_own: jax.Array, of_slabs: Sequence[jax.Array]) -> jax.Array:
    """Gradients of a device's own keys or values and of its halos, added where these come from."""
    (dimension, *others) = exchange.travelling
    if not others:
        return returned_to_neighbors(of_own, of_slabs, *_along(exchange, dimension), FIRST_TOKEN_AXIS + dimension)

    def exchanged(own: jax.Array) -> Any:
        patchwork = _Patchwork(own)
        for dimension in exchange.travelling:
            slabs = received_from_neighbors(patchwork.sent(exchange, dimension), *_along(exchange, dimension))
            patchwork = patchwork.with_halos(_Layer(dimension, slabs))
        return own, [slab for layer in patchwork.layers for slab in layer.slabs]

    (result,) = jax.vjp(exchanged, array)[1]((of_own, list(of_slabs)))
    return result  # type: ignore[no-any-return]


def _along(exchange: Exchange, dimension: int) -> tuple[Halo, Line]:
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


def _by_side(slabs: Sequence[jax.Array], halo: Halo) -> list[Sequence[jax.Array]]:
    """Those of each side on which a part has halos."""
    in_front = 0 if halo.changes_places else len(halo.slabs(halo.before))
    return [side for side in (slabs[:in_front], slabs[in_front:]) if side]


def _surrounded(own: jax.Array, slabs: Sequence[jax.Array], axis: int, halo: Halo, line: Line) -> jax.Array:
    """Tokens between their halos along an axis."""
    if halo.changes_places:
        in_front, behind = (jnp.concatenate(order, axis) for order in ([*slabs, own], [own, *slabs]))
        return jnp.where(line.place == 0, behind, in_front)
    count = len(halo.slabs(halo.before))
    return jnp.concatenate([*slabs[:count], own, *slabs[count:]], axis)


def _cut(array: jax.Array, starts: Sequence[Any], shape: Sequence[int]) -> jax.Array:
    """A box of an array, or all of it, where it is as large."""
    if array.shape == tuple(shape):
        return array
    return jax.lax.dynamic_slice(array, _from(array, starts), shape)


def _put(array: jax.Array, part: jax.Array, starts: Sequence[Any]) -> jax.Array:
    """The array, with a box of it replaced.

    By slices, which XLA updates in place: ``array.at[...]`` is a scatter whose indices are an empty constant where they
    are all static, and XLA of JAX 0.11 ends the process on such a constant in a ``jax.shard_map`` over explicit axes.
    """
    if array.shape == part.shape:
        return part
    return jax.lax.dynamic_update_slice(array, part, _from(array, starts))


def _from(array: jax.Array, starts: Sequence[Any]) -> list[Any]:
    """The first element, of a box whose tokens begin there."""
    return [0, *starts, *[0] * (array.ndim - 1 - len(starts))]


def _with(starts: Sequence[Any], dimension: int, start: Any) -> list[Any]:
    return [*starts[:dimension], start, *starts[dimension + 1 :]]


def _joined(arrays: Sequence[jax.Array], axis: int) -> jax.Array:
    return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays, axis)
