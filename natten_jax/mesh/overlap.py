"""Passes that compute while halos travel, where token dimensions are split over devices.

Forwards, queries that need nobody else's keys (the interior) run while the halos are on their way, and the others (the
borders) once these are there. Backwards, where the logsumexp is known, keys are divided instead: those that a device
has run with all of its queries while the others travel, and each halo with the queries that see it.

XLA starts an exchange as soon as its operands are there and waits for it where the first result is read. So all that
has to be said is that slabs are cut before the interior runs, and read after it: optimization barriers say so, which
on GPUs last until the program is scheduled.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from natten_jax.backends.base import Gradients, Operands, Output, Saved
from natten_jax.halo import Box, Division
from natten_jax.mesh.exchange import FIRST_TOKEN_AXIS, Exchange
from natten_jax.mesh.moves import received_from_neighbors, returned_to_neighbors, sent_to_neighbors
from natten_jax.resolve import Request

#: Run a forward pass, or a backward pass, on some of a device's queries and keys.
RunForward = Callable[[Request, Operands], Any]
RunBackward = Callable[[Request, Operands, Saved, Output], Gradients]
_Tree = TypeVar("_Tree")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Slabs:
    """Halos of an array along one token dimension.

    Attributes:
        dimension: Which.
        before: Those in front of a device's own tokens, in their order.
        after: Those behind.
    """

    dimension: int = dataclasses.field(metadata={"static": True})
    before: list[jax.Array]
    after: list[jax.Array]


@dataclasses.dataclass(frozen=True)
class _Patchwork:
    """Keys or values and their halos, which are joined only where something is taken of them.

    Attributes:
        own: What the device has.
        layers: Slabs by dimension, in the order in which they travel: they reach over the halos of all layers before.
    """

    own: jax.Array
    layers: tuple[_Slabs, ...] = ()

    def take(self, box: Box) -> jax.Array:
        """The tokens of a box, counted from the device's own first ones."""
        return self._take(len(self.layers), box)

    def _take(self, depth: int, box: Box) -> jax.Array:
        if not depth:
            return _cut(self.own, box)
        layer = self.layers[depth - 1]
        axis = FIRST_TOKEN_AXIS + layer.dimension
        (first, last), own = box[layer.dimension], self.own.shape[axis]
        start = -_tokens(layer.before, axis)
        pieces: list[jax.Array] = []
        for slab in (*layer.before, None, *layer.after):
            end = start + (own if slab is None else slab.shape[axis])
            begin, stop = max(first, start), min(last, end)
            if begin < stop and slab is None:
                pieces.append(self._take(depth - 1, _with(box, layer.dimension, (begin, stop))))
            elif begin < stop and slab is not None:
                within = self._within_slab(depth - 1, box)
                pieces.append(_cut(slab, _with(within, layer.dimension, (begin - start, stop - start))))
            start = end
        return _joined(pieces, axis)

    def _within_slab(self, depth: int, box: Box) -> Box:
        """A box, counted from the start of slabs that reach over the halos of the layers before them."""
        result = box
        for layer in self.layers[:depth]:
            shift = _tokens(layer.before, FIRST_TOKEN_AXIS + layer.dimension)
            first, last = result[layer.dimension]
            result = _with(result, layer.dimension, (first + shift, last + shift))
        return result

    def whole(self) -> Box:
        """All tokens that there are."""
        layout = self.own.shape[FIRST_TOKEN_AXIS:-2]
        box: Box = tuple((0, tokens) for tokens in layout)
        for layer in self.layers:
            axis = FIRST_TOKEN_AXIS + layer.dimension
            ends = -_tokens(layer.before, axis), layout[layer.dimension] + _tokens(layer.after, axis)
            box = _with(box, layer.dimension, ends)
        return box

    def sent(self, exchange: Exchange, dimension: int) -> list[jax.Array]:
        """What neighbors along a dimension need, halos that are there included."""
        edges = sent_to_neighbors(exchange.halos[dimension])
        return [self.take(_with(self.whole(), dimension, edge)) for edge in edges]

    def with_slabs_of(self, sent: Sequence[jax.Array], exchange: Exchange, dimension: int) -> _Patchwork:
        """With the halos along a dimension, from what all devices of the line send."""
        line = exchange.lines[dimension]
        assert line is not None
        received = received_from_neighbors(sent, exchange.halos[dimension], line)
        return dataclasses.replace(self, layers=(*self.layers, _Slabs(dimension, *received)))


def forward(
    run: RunForward, request: Request, exchange: Exchange, division: Division | None, operands: Operands
) -> Any:
    """A forward pass of all queries that a device has: the interior while halos travel, then the borders.

    Args:
        run: Runs the pass on some of them; it returns a tree of arrays per query.
        request: The whole call, with the device's batch and heads.
        exchange: What brings the halos.
        division: Of the device's queries; ``None`` leaves them together, and nothing is computed while halos travel.
        operands: What the device has, without origins.
    """
    if division is None:
        return run(request, exchange.brought(operands))
    axes = request.problem.axes
    interior = division.interior
    travel = _Travel(exchange, operands)
    query = travel.started_before(operands.query)

    def run_on(box: Box, key: jax.Array, value: jax.Array, first_keys: Sequence[int]) -> Any:
        origins = exchange.origins_of(_starts(box), first_keys)
        return run(request, operands._replace(query=_cut(query, box), key=key, value=value, origins=origins))

    result = travel.finished_after(run_on(interior, operands.key, operands.value, [0] * len(axes)))
    for i in reversed(range(len(axes))):
        pieces = [result]
        for side, box in enumerate(division.borders[i]):
            if box is not None:
                ranges = zip(exchange.halos, axes, box, strict=True)
                keys = tuple(halo.keys_of(axis, queries) for halo, axis, queries in ranges)
                key, value = (each.take(keys) for each in travel.patchworks)
                found = run_on(box, key, value, _starts(keys))
                pieces.insert(side * len(pieces), found)
        join = functools.partial(_joined, axis=FIRST_TOKEN_AXIS + i)
        result = jax.tree.map(lambda *arrays, join=join: join(arrays), *pieces)
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
    problem = request.problem
    of_halos = dataclasses.replace(request, problem=dataclasses.replace(problem, additional_kv=0))
    travel = _Travel(exchange, operands)
    query, saved, cotangents = of_queries = travel.started_before((operands.query, saved, cotangents))
    nothing = [0] * problem.rank
    own_operands = operands._replace(query=query, origins=exchange.origins_of(nothing, nothing))
    own = travel.finished_after(run(request, own_operands, saved, cotangents))
    of_query = own.query
    gradients: tuple[list[Any], list[Any]] = ([], [])
    all_queries: Box = tuple((0, halo.part) for halo in exchange.halos)
    held = all_queries  # keys, with the halos of the layers so far
    for layers in zip(*(each.layers for each in travel.patchworks), strict=True):
        i = layers[0].dimension
        halo, axis = exchange.halos[i], FIRST_TOKEN_AXIS + i
        begin, end = halo.borders(problem.axes[i])
        for seeing, start, slabs in (
            ((0, begin), -halo.before, [layer.before for layer in layers]),
            ((end, halo.part), halo.part, [layer.after for layer in layers]),
        ):
            if not slabs[0]:
                continue
            box = _with(all_queries, i, seeing)
            starts = _starts(_with(held, i, (start, start)))
            key, value = (_joined(each, axis) for each in slabs)
            queries, *others = jax.tree.map(functools.partial(_cut, box=box), of_queries)
            halo_operands = Operands(queries, key, value, None, None, exchange.origins_of(_starts(box), starts))
            found = run(of_halos, halo_operands, *others)
            of_query = _added(of_query, found.query, box)
            for list_, gradient in zip(gradients, (found.key, found.value), strict=True):
                list_ += _split(gradient, [slab.shape[axis] for slab in slabs[0]], axis)
        held = _with(held, i, (-halo.before, halo.part + halo.after))
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
        self.patchworks = [_Patchwork(operands.key), _Patchwork(operands.value)]

    def started_before(self, arrays: _Tree) -> _Tree:
        """Start; what is computed of the returned arrays comes after that.

        These should be all queries and what belongs to them, which a pass first cuts or reduces: that leaves
        multiprocessors to the kernels of the exchange, before one that keeps all of them to its end.
        """
        sent = [each.sent(self._exchange, self._first) for each in self.patchworks]
        sent, arrays = jax.lax.optimization_barrier((sent, arrays))
        self._exchange_along(self._first, sent)
        return arrays

    def finished_after(self, result: _Tree) -> _Tree:
        """Wait until something is computed, which is returned, and then for all halos."""
        slabs = [each.layers for each in self.patchworks]
        slabs, result = jax.lax.optimization_barrier((slabs, result))
        pairs = zip(self.patchworks, slabs, strict=True)
        self.patchworks = [dataclasses.replace(each, layers=layers) for each, layers in pairs]
        for dimension in self._others:
            self._exchange_along(dimension, [each.sent(self._exchange, dimension) for each in self.patchworks])
        return result

    def _exchange_along(self, dimension: int, sent: Sequence[Sequence[jax.Array]]) -> None:
        self.patchworks = [
            each.with_slabs_of(slabs, self._exchange, dimension)
            for each, slabs in zip(self.patchworks, sent, strict=True)
        ]


def _returned(exchange: Exchange, array: jax.Array, of_own: jax.Array, of_slabs: Sequence[jax.Array]) -> jax.Array:
    """Gradients of a device's own keys or values and of its halos, added where these come from."""
    (dimension, *others) = exchange.travelling
    if not others:
        line = exchange.lines[dimension]
        assert line is not None
        return returned_to_neighbors(of_own, of_slabs, exchange.halos[dimension], line, FIRST_TOKEN_AXIS + dimension)

    def exchanged(own: jax.Array) -> Any:
        patchwork = _Patchwork(own)
        for dimension in exchange.travelling:
            patchwork = patchwork.with_slabs_of(patchwork.sent(exchange, dimension), exchange, dimension)
        return own, [slab for layer in patchwork.layers for slab in (*layer.before, *layer.after)]

    (result,) = jax.vjp(exchanged, array)[1]((of_own, list(of_slabs)))
    return result  # type: ignore[no-any-return]


def _cut(array: jax.Array, box: Box) -> jax.Array:
    layout = array.shape[FIRST_TOKEN_AXIS:][: len(box)]
    is_all = all(ends == (0, tokens) for ends, tokens in zip(box, layout, strict=True))
    return array if is_all else array[_index(box)]


def _added(array: jax.Array, part: jax.Array, box: Box) -> jax.Array:
    """The array, with a part added in a box.

    By slices, which XLA updates in place: ``array.at[...]`` is a scatter whose indices are an empty constant where they
    are all static, and XLA of JAX 0.11 ends the process on such a constant in a ``jax.shard_map`` over explicit axes.
    """
    starts = [0, *_starts(box)]
    starts += [0] * (array.ndim - len(starts))
    own = jax.lax.dynamic_slice(array, starts, part.shape)
    return jax.lax.dynamic_update_slice(array, own + part, starts)


def _index(box: Box) -> tuple[slice, ...]:
    return (slice(None), *(slice(first, last) for first, last in box))


def _joined(arrays: Sequence[jax.Array], axis: int) -> jax.Array:
    return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays, axis)


def _split(array: jax.Array, lengths: Sequence[int], axis: int) -> list[jax.Array]:
    return jnp.split(array, np.cumsum(lengths)[:-1], axis)


def _starts(box: Box) -> list[int]:
    return [first for first, _ in box]


def _tokens(slabs: Sequence[jax.Array], axis: int) -> int:
    return sum(slab.shape[axis] for slab in slabs)


def _with(box: Box, dimension: int, ends: tuple[int, int]) -> Box:
    return (*box[:dimension], ends, *box[dimension + 1 :])
