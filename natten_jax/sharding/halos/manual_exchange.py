"""The exchange of halos inside ``jax.shard_map``, as one operation that JAX differentiates and batches.

It is linear, and its transpose is known: gradients of halos return to where these come from, and are added there. JAX
would derive that, too, with a copy of whole arrays for every slab. What ``jax.vmap`` maps joins the batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from natten_jax.arrays.avals import type_like, vary_alike
from natten_jax.arrays.operands import Operands
from natten_jax.halo import Halo, halos_of
from natten_jax.problem import Problem
from natten_jax.sharding.halos.device_line import lines_of, parts_of
from natten_jax.sharding.halos.exchange import FIRST_TOKEN_AXIS, Exchange, of_keys

TokenAxes = tuple[tuple[str, ...], ...]

_halos_p = Primitive("natten_jax_halos")
_halos_p.multiple_results = True


def brought(problem: Problem, token_axes: TokenAxes, operands: Operands) -> Operands:
    """A device's operands, with all keys that its windows reach, and where they lie in the global layout.

    Args:
        problem: The call, whose layout is the global one.
        token_axes: The manual mesh axes that each token dimension is split over.
        operands: What the device has.
    """
    held = of_keys(operands.inputs)
    arrays = vary_alike([*held.values()])
    extended = _halos_p.bind(*arrays, problem=problem, token_axes=token_axes, returns=False)
    origins = Exchange.of(problem, lines_of(token_axes)).origins()
    return Operands(operands.inputs._replace(**dict(zip(held, extended, strict=True))), origins)


@_halos_p.def_abstract_eval
def _types(*arrays: Any, problem: Problem, token_axes: TokenAxes, returns: bool) -> list[Any]:
    halos = [halo.evened() for halo in halos_of(problem, parts_of(token_axes))]
    layout = tuple(_held(halo) if not returns else halo.part for halo in halos)
    return [type_like(each, (each.shape[0], *layout, *each.shape[1 + len(layout) :]), each.dtype) for each in arrays]


def _held(halo: Halo) -> int:
    """Tokens of a part with its halos."""
    first, end = halo.held(0)
    return end - first


def _exchanged(*arrays: jax.Array, problem: Problem, token_axes: TokenAxes, returns: bool) -> list[jax.Array]:
    exchange = Exchange.of(problem, lines_of(token_axes))
    if not returns:
        return exchange.extended(arrays)
    layout = [halo.part for halo in exchange.halos]
    return [exchange.returned(array, layout) for array in arrays]


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
