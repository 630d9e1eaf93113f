"""The functions that list configurations: their arguments, and correct results with each listed configuration."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import natten_jax
from natten_jax import backends, simulator
from natten_jax.performance import PASSES, Pass
from natten_jax.plan.devices import default_device
from tests.support.families import Family, tile_pair
from tests.support.problems import Case, Trial, check, check_all, element_types

SHAPES = {1: (2, 40, 4, 16), 2: (2, 9, 10, 4, 16), 3: (2, 4, 5, 6, 4, 16)}


def is_tile(tile: Any, rank: int) -> bool:
    return isinstance(tile, tuple) and len(tile) == rank and all(type(n) is int and n >= 1 for n in tile)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_neighborhood_query_lists_pairs_of_tile_shapes(family: Family, rank: int, pass_: str) -> None:
    function = family.query("fna", pass_)
    configs = function(jnp.zeros(SHAPES[rank], family.dtype))
    assert configs
    assert all(len(config) == 2 and all(is_tile(tile, rank) for tile in tile_pair(config)) for config in configs)
    assert len(set(configs)) == len(configs)


def test_query_takes_one_array_or_three_or_their_types(family: Family, pass_: str) -> None:
    array = jnp.zeros(SHAPES[2], family.dtype)
    struct = jax.ShapeDtypeStruct(array.shape, array.dtype)
    function = family.query("fna", pass_)
    expected = function(array)
    assert function(struct) == expected
    assert function(array, array, array) == expected
    assert function(struct, struct, struct) == expected
    assert function(query=struct, key=struct, value=struct) == expected
    jax.eval_shape(lambda traced: np.testing.assert_equal(function(traced), expected), struct)
    narrow = jax.ShapeDtypeStruct((*array.shape[:-2], 2, 16), array.dtype)
    wide = jax.ShapeDtypeStruct((*array.shape[:-2], 2, 40), array.dtype)
    assert function(struct, narrow, wide, kernel_size=(3, 5), stride=2, dilation=1, is_causal=(True, False))


def test_query_is_empty_if_the_backend_cannot_run(native_family: Family) -> None:
    with element_types("float64"):
        array = jax.ShapeDtypeStruct(SHAPES[1], jnp.float64)
        for operator, pass_ in itertools.product(("fna", "fmha"), PASSES):
            assert native_family.query(operator, pass_)(array) == []


@pytest.mark.parametrize("compute_capability", ["9.0", (9, 0), "8.6", (10, 3)])
def test_query_for_another_device(family: Family, compute_capability: Any) -> None:
    for operator in ("fna", "fmha"):
        function = family.query(operator, "forward")
        found = function(jnp.zeros(SHAPES[1], family.dtype), compute_capability=compute_capability)
        if not family.needs_gpu:
            assert bool(found) == (family.capabilities.platform is None)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda f: f(jnp.zeros((2, 40, 16))), ValueError, "query has shape"),
        (lambda f: f(jnp.zeros(SHAPES[1]), kernel_size=41), ValueError, "kernel_size"),
        (lambda f: f(jnp.zeros(SHAPES[1]), kernel_size=3, stride=4), ValueError, "stride"),
        (lambda f: f(jnp.zeros(SHAPES[1]), jnp.zeros((2, 41, 4, 16))), ValueError, "key has token layout"),
        (lambda f: f([1, 2]), TypeError, "query"),
    ],
    ids=["rank", "window", "stride", "layout", "type"],
)
def test_query_checks_its_arguments(family: Family, call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(family.query("fna", "forward"))


MAX_PAIRS = 40  # maximum per list; longer lists are sampled at even steps


def _spread(configs: list[Any]) -> list[Any]:
    pairs = list(dict.fromkeys(map(tile_pair, configs)))
    return pairs[:: -(-len(pairs) // MAX_PAIRS)]


def every_pair(family: Family, operator: str, *arrays: Any, **window: Any) -> list[dict[str, Any]]:
    """Return the tile arguments of a minimum number of calls that together use every listed tile pair of each pass."""
    suffix = "shape" if operator == "fna" else "size"
    listed = {
        "" if pass_ == "forward" else "backward_": _spread(family.query(operator, pass_)(*arrays, **window))
        for pass_ in PASSES
    }
    return [
        {
            f"{prefix}{role}_tile_{suffix}": tile
            for prefix, configs in listed.items()
            for role, tile in zip(("q", "kv"), configs[i % len(configs)], strict=True)
        }
        for i in range(max(map(len, listed.values())))
    ]


EVERY_TILE = {
    1: Case((150,), (40,), stride=(3,), is_causal=(True,)),
    2: Case((19, 21), (6, 5), stride=(1, 4), dilation=(2, 1), heads=2),
    3: Case((5, 9, 11), (3, 4, 5), stride=(2, 1, 3), is_causal=(False, True, False)),
}


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_every_listed_tile_shape_runs_and_is_right(family: Family, rank: int) -> None:
    case = EVERY_TILE[rank]
    array = jax.ShapeDtypeStruct((1, *case.layout, case.heads, 8), family.dtype)
    key = jax.ShapeDtypeStruct((1, *case.layout, 1, 8), family.dtype)
    pairs = every_pair(family, "fna", array, key, key, **case.window_arguments)
    check_all([Trial(case, family.dtype, arguments=tiles) for tiles in pairs], family)


@pytest.mark.parametrize(
    ("rank", "q_tile", "kv_tile"),
    [(1, (256,), (64,)), (1, (130,), (128,)), (2, (16, 16), (8, 8)), (3, (5, 8, 6), (4, 4, 4))],
)
def test_tiles_of_more_than_128_queries_are_right(
    family: Family, rank: int, q_tile: tuple[int, ...], kv_tile: tuple[int, ...]
) -> None:
    layout = {1: (600,), 2: (33, 34), 3: (6, 17, 13)}[rank]  # the last tile of each dimension is partly filled
    case = dataclasses.replace(
        EVERY_TILE[rank], layout=layout, head_dim=128, heads=2, batch=2, additional=9, fused=True
    )
    problem = simulator.problem_of(case.layout, **case.window_arguments, heads=2, head_dim=128)
    if not backends.find(family.fna, "fna").offers(problem, default_device(), "forward", (q_tile, kv_tile)):
        pytest.skip("the backend has no such tiles here")
    check(case, family, "bfloat16", q_tile_shape=q_tile, kv_tile_shape=kv_tile)


def test_every_listed_tile_size_of_attention_runs_and_is_right(family: Family) -> None:
    case = Case((70,), queries=150, is_causal=(True,))
    query, key = (jax.ShapeDtypeStruct((1, n, 1, 8), family.dtype) for n in (150, 70))
    pairs = every_pair(family, "fmha", query, key, key, is_causal=True)
    check_all([Trial(case, family.dtype, arguments=tiles) for tiles in pairs], family)


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("arguments", [{"kernel_size": 3}, {"kernel_size": (3, 5), "stride": (1, 2)}, {}], ids=str)
def test_configs_are_arguments_of_the_operator(arguments: dict[str, Any], pass_: Pass) -> None:
    rank, operator = (2, natten_jax.na2d) if arguments else (1, natten_jax.attention)
    array = jax.random.normal(jax.random.key(0), SHAPES[rank])

    def loss(x: jax.Array, **configuration: Any) -> jax.Array:
        return (operator(x, x, x, **arguments, **configuration) ** 2).sum()

    found = natten_jax.configs(array, **arguments, pass_=pass_)
    assert len(found) > 1
    expected = jax.grad(loss)(array)
    for configuration in found[:2]:
        np.testing.assert_allclose(jax.grad(loss)(array, **configuration), expected, atol=1e-4)


@pytest.mark.parametrize("pass_", PASSES)
def test_configs_are_for_the_backend_that_runs_the_call(pass_: Pass) -> None:
    tokens = jax.ShapeDtypeStruct((1, 256, 256, 4, 128), "bfloat16")
    found = natten_jax.configs(tokens, kernel_size=33, pass_=pass_, compute_capability="9.0")
    assert {each["backend"] for each in found} == {"hopper-fna"}
    assert all(("kernel_schedule" in each) == (pass_ == "forward") for each in found)
    portable = natten_jax.configs(tokens, kernel_size=33, pass_=pass_, compute_capability="8.0")
    assert {each["backend"] for each in portable} == {"cutlass-fna"}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"kernel_size": 3, "pass_": "fwd"}, ValueError, "pass_ must be one of 'forward', 'backward', got 'fwd'"),
        ({"kernel_size": 3, "pass_": jnp.ones(2)}, ValueError, "pass_ must be one of 'forward', 'backward', got Array"),
        ({"kernel_size": 3, "backend": jnp.ones(2)}, TypeError, "backend must be of type str, got Array"),
        ({"kernel_size": 3, "backend": "hopper-fna"}, ValueError, "backend='hopper-fna' cannot run"),
        ({"kernel_size": 3, "window": 1}, TypeError, r"configs\(\) got an unexpected keyword argument 'window'"),
        ({}, ValueError, "attention takes 4-dimensional arrays"),
        ({"stride": 2}, TypeError, r"configs\(\) got an unexpected keyword argument 'stride'"),
    ],
    ids=str,
)
def test_configs_raise_errors_for_invalid_arguments(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        natten_jax.configs(jnp.zeros(SHAPES[2]), **arguments)
