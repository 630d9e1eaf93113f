"""Passes that compute while halos travel, where token dimensions are split over devices.

Keys are divided: a device runs those that it has with all of its queries while the others travel, and then each slab of
halos with the queries that see it, while the next one travels. Forwards the outputs are merged by their logsumexp,
where queries see both; backwards, where the logsumexp is that of all keys, gradients add up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax

from natten_jax.backends.base import Gradients, Operands, Output, Saved
from natten_jax.mesh.exchange import Exchange
from natten_jax.mesh.travel import Place, Travel, places_of, returned
from natten_jax.partial_outputs import merged
from natten_jax.resolve import Request

#: Run a forward pass, or a backward pass, on some of a device's queries and keys.
RunForward = Callable[[Request, Operands], Saved]
RunBackward = Callable[[Request, Operands, Saved, Output], Gradients]


def forward(run: RunForward, request: Request, exchange: Exchange, operands: Operands) -> Saved:
    """A forward pass of all queries that a device has: with its own keys while halos travel, then with these.

    Additional keys go with the device's own.

    Args:
        run: Runs the pass on some of the keys.
        request: The whole call, with the device's batch and heads.
        exchange: What brings the halos, none of which are gathered.
        operands: What the device has, without origins.
    """
    travel = Travel(places_of(request.problem, exchange), exchange, operands)
    query, seeing = travel.started_before(operands.query, operands.query)
    found = run(request, operands._replace(query=query, origins=_own_origins(exchange)))
    results: list[Saved] = []
    for place in travel.places:
        (key, value), found = travel.finished_after(found)
        results.append(found)
        query, seeing = travel.started_before(seeing, operands.query)
        found = run(_of_halos(request), Operands(query, key, value, None, None, _origins(exchange, place)))
    result, *of_halos = [*results, found]
    for place, of_halo in zip(travel.places, of_halos, strict=True):
        both = merged(jax.tree.map(place.cut, result), of_halo)
        result = jax.tree.map(place.put, result, both)
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
    travel = Travel(places_of(request.problem, exchange), exchange, operands)
    of_queries = operands.query, saved, cotangents
    (query, saved, cotangents), seeing = travel.started_before(of_queries, of_queries)
    own_operands = operands._replace(query=query, origins=_own_origins(exchange))
    found = run(request, own_operands, saved, cotangents)
    results: list[Gradients] = []
    for place in travel.places:
        (key, value), found = travel.finished_after(found)
        results.append(found)
        (query, saved, cotangents), seeing = travel.started_before(seeing, of_queries)
        halo_operands = Operands(query, key, value, None, None, _origins(exchange, place))
        found = run(_of_halos(request), halo_operands, saved, cotangents)
    own, *of_halos = [*results, found]
    of_query = own.query
    for place, gradients in zip(travel.places, of_halos, strict=True):
        of_query = place.put(of_query, place.cut(of_query) + gradients.query)
    key = returned(exchange, travel.places, operands.key, [own.key, *(each.key for each in of_halos)])
    value = returned(exchange, travel.places, operands.value, [own.value, *(each.value for each in of_halos)])
    return own._replace(query=of_query, key=key, value=value)


def _own_origins(exchange: Exchange) -> jax.Array:
    nothing = [0] * len(exchange.halos)
    return exchange.origins_of(nothing, nothing)


def _origins(exchange: Exchange, place: Place) -> jax.Array:
    return exchange.origins_of(place.first_query, place.first_key)


def _of_halos(request: Request) -> Request:
    return dataclasses.replace(request, problem=dataclasses.replace(request.problem, additional_kv=0))
