"""Halo exchange: devices receive keys and values from their neighbors if token dimensions are split over devices.

Queries are not exchanged. A device receives the keys and values that the windows of its queries reach
(:mod:`natten_jax.halo`). It then runs the pass at the position of its tokens in the global layout. The transpose of the
exchange sends the gradients of received keys and values back to the devices that own these tokens. Each device adds the
gradients that it receives to the gradients of its local tokens.

Inside ``jax.shard_map`` the exchange is one linear operation with a custom transpose. The transpose that JAX would
derive is equivalent, but it would copy whole arrays for every slab (the keys of a halo that come from one device).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from natten_jax.arrays.operands import Inputs, Operands, key_arrays, types_like, vary_alike
from natten_jax.halo import Halo, halos_of
from natten_jax.problem import Problem


@dataclasses.dataclass(frozen=True)
class DeviceLine:
    """A *line*: the devices over which a token dimension is split, in the order of their parts.

    Attributes:
        parts: Number of devices.
        index: Index of this device in the line.
        permute: Sends arrays along the line, given (source, destination) pairs of indices. A device that is not a
            destination receives zeros.
        gather: Gathers the parts of an array from all devices of the line, and concatenates them along an axis.
    """

    parts: int
    index: Any
    permute: Callable[[jax.Array, Sequence[tuple[int, int]]], jax.Array]
    gather: Callable[[jax.Array, int], jax.Array]

    def shift(self, array: jax.Array, hops: int, *, is_ring: bool = False) -> jax.Array:
        """Return the array of the device that is ``hops`` positions before this device.

        If ``hops`` is negative, that device is ``-hops`` positions after this device. In a ring, the last device
        precedes the first device.
        """
        positions = range(self.parts)
        if is_ring:
            return self.permute(array, [(index, (index + hops) % self.parts) for index in positions])
        return self.permute(array, [(index, index + hops) for index in positions if index + hops in positions])


def lines_of(token_axes: Sequence[tuple[str, ...]]) -> list[DeviceLine | None]:
    """Return the line of devices of each token dimension, given the manual mesh axes that split the dimension.

    The line of a dimension that is not split is ``None``.
    """
    return [
        _line_of(names) if parts > 1 else None for names, parts in zip(token_axes, parts_of(token_axes), strict=True)
    ]


def parts_of(token_axes: Sequence[tuple[str, ...]]) -> tuple[int, ...]:
    """Return the number of parts into which manual mesh axes split each token dimension."""
    return tuple(jax.lax.axis_size(names) if names else 1 for names in token_axes)


def _line_of(names: tuple[str, ...]) -> DeviceLine:
    """Return the line of devices along manual mesh axes; the first axis varies slowest."""
    parts = jax.lax.axis_size(names)

    def permute(array: jax.Array, moves: Sequence[tuple[int, int]]) -> jax.Array:
        return jax.lax.ppermute(array, names, moves)

    def gather(array: jax.Array, axis: int) -> jax.Array:
        return jax.lax.all_gather(array, names, axis=axis, tiled=True)

    return DeviceLine(parts, jax.lax.axis_index(names), permute, gather)


class Move(NamedTuple):
    """The exchange of a slab: each device of a line sends tokens, which become part of the receiver's halo.

    Attributes:
        edge: Offset of the slab in the sender's part. It depends on the device if two devices swap their halos.
        start: Offset of the slab in the receiver's part with halos. If two devices swap their halos, this offset also
            depends on the device.
        tokens: Number of tokens in the slab.
        send: Sends an array from senders to receivers.
        send_back: Sends an array from receivers to senders.
    """

    edge: Any
    start: Any
    tokens: int
    send: Callable[[jax.Array], jax.Array]
    send_back: Callable[[jax.Array], jax.Array]


def moves_of(halo: Halo, line: DeviceLine) -> list[Move]:
    """Return a move for each slab of the halo before a part, and then for each slab of the halo after the part.

    The slabs of each halo are ordered from the nearest to the farthest, as in
    :meth:`natten_jax.halo.Halo.seen_slabs`. If two devices swap their halos, there is one move.
    """
    if halo.changes_places:
        is_front = line.index == 0
        edge = jnp.where(is_front, halo.part - halo.before, 0)
        behind = jnp.where(is_front, halo.before + halo.part, 0)
        # Both devices send in one exchange. Two exchanges, one per direction, would each use only half of the link.

        def swapped(array: jax.Array) -> jax.Array:
            return line.permute(array, [(0, 1), (1, 0)])

        return [Move(edge, behind, halo.before, swapped, swapped)]

    def move(hops: int, edge: int, start: int, tokens: int) -> Move:
        send, send_back = (functools.partial(line.shift, hops=sign * hops, is_ring=halo.wraps) for sign in (1, -1))
        return Move(edge, start, tokens, send, send_back)

    moves: list[Move] = []
    start = halo.before
    for hops, tokens in enumerate(halo.slabs(halo.before), 1):
        start -= tokens
        moves.append(move(hops, halo.part - tokens, start, tokens))
    start = halo.before + halo.part
    for hops, tokens in enumerate(halo.slabs(halo.after), 1):
        moves.append(move(-hops, 0, start, tokens))
        start += tokens
    return moves


def extended(arrays: Sequence[jax.Array], halo: Halo, line: DeviceLine, axis: int) -> list[jax.Array]:
    """Extend the arrays of a part by their halos along an axis.

    If ``halo.is_gathered``, the arrays of all parts are gathered instead.
    """
    if halo.is_gathered:
        return [line.gather(array, axis) for array in arrays]
    # Local tokens are copied into the extended array while the halos travel. Exchanges run one at a time, and a copy
    # takes about as long as an exchange. So the halos of an array are sent after the local tokens of the previous array
    # have been copied.
    padding = halo.before, halo.after, 0
    moves = moves_of(halo, line)
    copied: list[jax.Array] = []
    arrived: list[list[jax.Array]] = []
    for array in arrays:
        sent = [jax.lax.dynamic_slice_in_dim(array, each.edge, each.tokens, axis) for each in moves]
        sent, copied = jax.lax.optimization_barrier((sent, copied))
        arrived.append([each.send(slab) for each, slab in zip(moves, sent, strict=True)])
        copied.append(jax.lax.pad(array, jnp.zeros((), array.dtype), _along(padding, axis, array.ndim)))
    for i, slabs in enumerate(arrived):
        for each, slab in zip(moves, slabs, strict=True):
            copied[i] = jax.lax.dynamic_update_slice_in_dim(copied[i], slab, each.start, axis)
    return copied


def _along(padding: tuple[int, int, int], axis: int, ndim: int) -> list[tuple[int, int, int]]:
    return [padding if i == axis else (0, 0, 0) for i in range(ndim)]


def returned(array: jax.Array, halo: Halo, line: DeviceLine, axis: int) -> jax.Array:
    """Apply the transpose of :func:`extended` to one array."""
    if halo.is_gathered:
        (local,) = types_like(array, ((*array.shape[:axis], halo.part, *array.shape[axis + 1 :]), array.dtype))
        (gradient,) = jax.linear_transpose(lambda local: line.gather(local, axis), local)(array)
        return gradient  # type: ignore[no-any-return]
    local = jax.lax.slice_in_dim(array, halo.before, halo.before + halo.part, axis=axis)
    moves = moves_of(halo, line)
    slabs = [jax.lax.dynamic_slice_in_dim(array, each.start, each.tokens, axis) for each in moves]
    return add_edges(local, slabs, moves, axis)


def add_edges(local: jax.Array, slabs: Sequence[jax.Array], moves: Sequence[Move], axis: int) -> jax.Array:
    """Send the gradients of halos back to the devices that own the tokens, and add them to the gradients there."""
    for move, slab in zip(moves, slabs, strict=True):
        edge = opaque_index(move.edge)
        sum_ = move.send_back(slab) + jax.lax.dynamic_slice_in_dim(local, edge, move.tokens, axis)
        local = jax.lax.dynamic_update_slice_in_dim(local, sum_, edge, axis)
    return local


def opaque_index(start: Any) -> jax.Array:
    """Hide the start of a slice from XLA's constant folding.

    Callers read a slice of an array, change it and write it back. If the start of the slice is a constant, XLA copies
    the whole array. If the start is unknown, XLA updates only the slice. For a slice of 8 MB in an array of 134 MB, an
    H200 needs 81 microseconds with a constant start and 7 microseconds with an unknown start.
    """
    return jax.lax.optimization_barrier(jnp.asarray(start, jnp.int32))


FIRST_TOKEN_AXIS = 1  # axis 0 is the batch


@dataclasses.dataclass(frozen=True)
class Exchange:
    """The halo exchange of a call.

    Attributes:
        halos: Halo of each token dimension.
        lines: Line of devices of each token dimension; ``None`` for a dimension that is not split.
    """

    halos: Sequence[Halo]
    lines: Sequence[DeviceLine | None]

    @classmethod
    def for_problem(cls, problem: Problem, lines: Sequence[DeviceLine | None]) -> Exchange:
        """Create the exchange of a call; ``problem`` has the global layout.

        If two devices split a dimension that does not wrap, their halos get equal lengths, so that the devices can swap
        the halos in one exchange.
        """
        halos = halos_of(problem, [1 if line is None else line.parts for line in lines])
        return cls([halo.evened() for halo in halos], lines)

    @property
    def parts(self) -> tuple[int, ...]:
        """Number of parts of each token dimension."""
        return tuple(halo.parts for halo in self.halos)

    def with_halos(self, operands: Operands) -> Operands:
        """Exchange halos; return the device's operands with all keys that its windows reach, and with origins."""
        held = key_arrays(operands.inputs)
        extended = dict(zip(held, self.extended([*held.values()]), strict=True))
        return operands.with_origins(self.origins(), **extended)

    def extended(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Extend keys and values by all tokens that the windows of this device reach.

        Halos are exchanged along one dimension after another. The tokens that are sent along a dimension include the
        halos of the previous dimensions, so that the corners of the halos are also exchanged.
        """
        for axis, halo, line in self._split_axes():
            arrays = extended(arrays, halo, line, axis)
        return list(arrays)

    def returned(self, array: jax.Array) -> jax.Array:
        """Apply the transpose of :meth:`extended` to one array.

        Halos are sent back to the devices that own their tokens, and added to the arrays there.
        """
        for axis, halo, line in reversed(self._split_axes()):
            array = returned(array, halo, line, axis)
        return array

    def _split_axes(self) -> list[tuple[int, Halo, DeviceLine]]:
        return [
            (FIRST_TOKEN_AXIS + i, halo, line)
            for i, (halo, line) in enumerate(zip(self.halos, self.lines, strict=True))
            if line is not None and (halo.is_gathered or halo.received)
        ]

    def origins(self) -> jax.Array:
        """Return the positions of this device's first query and first key (including halos) in the global layout."""
        first_keys = [-halo.before for halo in self.halos]
        offset = self.origins_of([0] * len(self.halos), first_keys)
        is_gathered = [line is not None and halo.is_gathered for halo, line in zip(self.halos, self.lines, strict=True)]
        pad = [False] * (3 - len(is_gathered))
        return jnp.where(np.array([[False] * 3, [*pad, *is_gathered]]), 0, offset) if any(is_gathered) else offset

    def origins_of(self, queries: Sequence[Any], keys: Sequence[Any]) -> jax.Array:
        """Convert a query position and a key position in this device's part to origins in the global layout."""
        parts = [
            jnp.zeros((), jnp.int32) if line is None else jnp.asarray(line.index, jnp.int32) * halo.part
            for halo, line in zip(self.halos, self.lines, strict=True)
        ]
        pad = [jnp.zeros((), jnp.int32)] * (3 - len(parts))
        rows = [[part + start for part, start in zip(parts, starts, strict=True)] for starts in (queries, keys)]
        return jnp.stack([*pad, *rows[0], *pad, *rows[1]]).reshape(2, 3)


def with_all_keys(inputs: Inputs, lines: Sequence[DeviceLine | None]) -> Inputs:
    """Gather the keys and values of all devices along the split token dimensions."""
    held = key_arrays(inputs)
    for i, line in enumerate(lines):
        if line is not None:
            held = {name: line.gather(array, FIRST_TOKEN_AXIS + i) for name, array in held.items()}
    return inputs._replace(**held)


def flat_origins(layout: Sequence[int], lines: Sequence[DeviceLine | None]) -> jax.Array:
    """Return the origins of a device's queries and keys in the flattened sequence, int32 ``[2, 3]``.

    The device has the keys of the whole sequence, so their origin is 0. If the layout has several dimensions, the
    queries of a device need not be contiguous in the sequence. Their origin is then also 0. A call with several
    dimensions has no causal mask, so its result does not depend on positions.
    """
    (line, *more_lines) = lines
    first = 0 if line is None or more_lines else line.index * layout[0]
    return jnp.zeros((2, 3), jnp.int32).at[0, 2].set(first)


TokenAxes = tuple[tuple[str, ...], ...]

_halos_p = Primitive("natten_jax_halos")
_halos_p.multiple_results = True


def with_halos(problem: Problem, token_axes: TokenAxes, operands: Operands) -> Operands:
    """Exchange halos; return the device's operands with all keys that its windows reach, and with origins.

    Args:
        problem: Problem of the call on the global layout.
        token_axes: Manual mesh axes that split each token dimension.
        operands: Local operands of the device.
    """
    held = key_arrays(operands.inputs)
    arrays = vary_alike([*held.values()])
    extended = _halos_p.bind(*arrays, problem=problem, token_axes=token_axes, returns=False)
    origins = Exchange.for_problem(problem, lines_of(token_axes)).origins()
    return operands.with_origins(origins, **dict(zip(held, extended, strict=True)))


@_halos_p.def_abstract_eval
def _types(*arrays: Any, problem: Problem, token_axes: TokenAxes, returns: bool) -> list[Any]:
    halos = [halo.evened() for halo in halos_of(problem, parts_of(token_axes))]
    ranges = [(0, halo.part) if returns else halo.held(0) for halo in halos]
    layout = [end - first for first, end in ranges]
    shapes = [(each.shape[0], *layout, *each.shape[1 + len(layout) :]) for each in arrays]
    return [types_like(each, (shape, each.dtype))[0] for each, shape in zip(arrays, shapes, strict=True)]


def _exchanged(*arrays: jax.Array, problem: Problem, token_axes: TokenAxes, returns: bool) -> list[jax.Array]:
    exchange = Exchange.for_problem(problem, lines_of(token_axes))
    return [*map(exchange.returned, arrays)] if returns else exchange.extended(arrays)


@_halos_p.def_impl
def _run_now(*arrays: Any, **parameters: Any) -> Any:
    with jax.disable_jit(False):
        return _compiled(**parameters)(*arrays)


@functools.lru_cache(maxsize=256)
def _compiled(**parameters: Any) -> Callable[..., Any]:
    return jax.jit(functools.partial(_exchanged, **parameters))


def _differentiate(primals: Sequence[jax.Array], tangents: Sequence[Any], **parameters: Any) -> tuple[Any, Any]:
    return _halos_p.bind(*primals, **parameters), _halos_p.bind(*map(ad.instantiate_zeros, tangents), **parameters)


def _transpose(cotangents: Sequence[Any], *_: Any, returns: bool, **parameters: Any) -> Any:
    return _halos_p.bind(*map(ad.instantiate_zeros, cotangents), returns=not returns, **parameters)


def _map(arrays: Sequence[jax.Array], axes: Sequence[int | None], **parameters: Any) -> tuple[Any, Any]:
    (size,) = {array.shape[axis] for array, axis in zip(arrays, axes, strict=True) if axis is not None}

    def joined(array: jax.Array, axis: int | None) -> jax.Array:
        array = jnp.broadcast_to(array, (size, *array.shape)) if axis is None else jnp.moveaxis(array, axis, 0)
        return array.reshape(-1, *array.shape[FIRST_TOKEN_AXIS + 1 :])

    results = _halos_p.bind(*map(joined, arrays, axes), **parameters)
    return [each.reshape(size, -1, *each.shape[FIRST_TOKEN_AXIS:]) for each in results], [0] * len(results)


ad.primitive_jvps[_halos_p] = _differentiate
ad.primitive_transposes[_halos_p] = _transpose
batching.primitive_batchers[_halos_p] = _map
mlir.register_lowering(_halos_p, mlir.lower_fun(_exchanged, multiple_results=True))
