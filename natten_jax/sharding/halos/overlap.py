"""Passes that compute while halos travel, where token dimensions are split over devices.

Keys are divided: a device runs those that it has with all of its queries while the others travel, and then each slab of
halos with the queries that see it, while the next one travels. Forwards each pass continues the one before: outputs are
merged by their logsumexp, where queries see both. Backwards, where the logsumexp is that of all keys, gradients add up.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from natten_jax.arrays.operands import Cotangents, Gradients, Inputs, Operands, Saved
from natten_jax.arrays.query_box import QueryBox
from natten_jax.arrays.roles import roles_of_fields
from natten_jax.plan.request import Request
from natten_jax.sharding.halos.exchange import Exchange
from natten_jax.sharding.halos.pipeline import HaloPipeline, returned, slabs_of

_Tree = TypeVar("_Tree")

#: Run a forward pass, or a backward pass, on some of a device's queries and keys.
RunForward = Callable[[Request, Operands], Saved]
RunBackward = Callable[[Request, Operands, Saved, Cotangents], Gradients]
#: Run a forward pass on more keys, for some of the queries, after one that saved what is given.
ContinueForward = Callable[[Request, Operands, Saved, QueryBox], Saved]


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
    found = run(request, Operands(operands.inputs._replace(query=query), _own_origins(exchange, nothing)))
    for slab in travel.slabs:
        (key, value), found = travel.finished_after(found)
        assert seeing is not None
        (found, nothing), seeing_next = travel.started_before((found, nothing))
        origins = exchange.origins_of([nothing] * len(exchange.halos), slab.first_key)
        found = run_on(*_of_halo(request, operands.inputs, query, key, value, origins), found, seeing)
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
    own_operands = Operands(operands.inputs._replace(query=query), _own_origins(exchange, 0))
    found = run(request, own_operands, saved, cotangents)
    results: list[Gradients] = []
    for slab in travel.slabs:
        (key, value), found = travel.finished_after(found)
        results.append(found)
        assert seen_next is not None
        (query, saved, cotangents), seen_next = _started_and_cut(travel, seen_next, of_queries)
        origins = exchange.origins_of(slab.seeing.starts, slab.first_key)
        found = run(*_of_halo(request, operands.inputs, query, key, value, origins), saved, cotangents)
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


def _of_halo(
    request: Request, inputs: Inputs, query: jax.Array, key: jax.Array, value: jax.Array, origins: jax.Array
) -> tuple[Request, Operands]:
    """What runs with a slab of keys and values: no additional ones, which go with the device's own."""
    inputs = inputs._replace(query=query, key=key, value=value, additional_keys=None, additional_values=None)
    problem = dataclasses.replace(request.problem, additional_kv=0)
    return dataclasses.replace(request, problem=problem), Operands(inputs, origins)
