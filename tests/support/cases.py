"""Test problems: random problems, problems of one feature each, and plain attention."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import jax
import numpy as np

from natten_jax import backends
from natten_jax.arrays.operands import Inputs
from natten_jax.ops.canonicalize import neighborhood_problem
from natten_jax.performance import PASSES, tile_names
from natten_jax.plan import devices
from natten_jax.windows import EDGES, Edge, WindowArguments
from tests.support.families import Family, tile_pair
from tests.support.problems import Case


def random_case(seed: int, *, rank: int | None = None, tokens: int | None = None) -> Case:
    """Draw a problem with random operator arguments and at most ``tokens`` tokens.

    The default limit is 480 tokens for a quarter of the problems, and 120 tokens for the others.
    """
    rng = np.random.default_rng([seed, 2])
    rank = int(rng.integers(1, 4)) if rank is None else rank
    is_large = rng.random() < 0.25
    tokens = tokens or (480 if is_large else 120)
    while True:
        highest = {1: tokens, 2: tokens // 6, 3: tokens // 12}[rank]
        layout = tuple(int(n) for n in rng.integers(1, highest + 1, rank))
        if math.prod(layout) <= tokens:
            break
    dimensions = [_random_window(rng, extent) for extent in layout]
    kernel_size, stride, dilation, is_causal = zip(*dimensions, strict=True)
    edges = np.random.default_rng([seed, 4]).choice(EDGES, rank, p=[0.6, 0.2, 0.2]).tolist()
    edges = [
        _fitting_edge(edge, extent, window) for edge, extent, window in zip(edges, layout, dimensions, strict=True)
    ]
    heads_kv = int(rng.integers(1, 2 if is_large else 4))
    scale_factor = rng.choice([math.nan, 0.0, -1.0, 0.5], p=[0.7, 0.1, 0.1, 0.1])
    head_dim = int(rng.choice([1, 3, 8, 16, 17, 24, 32, 40, 64]))
    additional = int(rng.integers(1, 20)) if rng.random() < 0.3 else 0
    case = Case(
        layout=layout,
        kernel_size=kernel_size,
        stride=stride,
        dilation=dilation,
        is_causal=is_causal,
        edges=tuple(edges),
        batch=int(rng.integers(1, 4)),
        heads=heads_kv * int(rng.integers(1, 4)),
        heads_kv=heads_kv,
        head_dim=head_dim,
        head_dim_v=int(rng.choice([1, 5, 8, 20, 32, 48])) if rng.random() < 0.4 else None,
        scale=None if math.isnan(scale_factor) else float(scale_factor) * head_dim**-0.5,
        additional=additional,
        fused=bool(rng.random() < 0.5),
    )
    return dataclasses.replace(case, scales=_random_scales(rng, case)) if rng.random() < 0.25 else case


def as_attention(rng: np.random.Generator, case: Case, most: int) -> Case:
    """Return a plain attention problem with random numbers of queries and keys, and the heads of ``case``."""
    queries, keys = (int(n) for n in rng.integers(1, most, 2))
    facts: dict[str, Any] = dict.fromkeys(("kernel_size", "stride", "dilation", "edges"))
    facts |= {"queries": queries, "is_causal": (bool(rng.random() < 0.5),), "additional": 0, "fused": False}
    return dataclasses.replace(case, layout=(keys,), **facts)


def _random_scales(rng: np.random.Generator, case: Case) -> tuple[float, ...]:
    """Draw a scale per head, or a single scale for all heads."""
    factors = rng.choice([0.0, -1.0, 0.5, 1.0, 1.7], case.heads if rng.random() < 0.5 else 1)
    return tuple(float(factor) * case.head_dim**-0.5 for factor in factors)


def _fitting_edge(edge: Edge, extent: int, window: tuple[int, int, int, bool]) -> Edge:
    """Return ``edge`` if the dimension supports it. Otherwise return a supported edge mode."""
    _, _, dilation, is_causal = window
    if is_causal:
        return "shift"
    return "cut" if edge == "wrap" and extent % dilation else edge


def _random_window(rng: np.random.Generator, extent: int) -> tuple[int, int, int, bool]:
    dilation = 1 if rng.random() < 0.6 else int(rng.integers(1, extent + 1))
    largest = extent // dilation
    kind = rng.random()
    if kind < 0.1:
        kernel_size = 1
    elif kind < 0.3:
        kernel_size = largest
    else:
        kernel_size = int(rng.integers(1, largest + 1))
    kind = rng.random()
    if kind < 0.4:
        stride = 1
    elif kind < 0.6:
        stride = kernel_size
    else:
        stride = int(rng.integers(1, kernel_size + 1))
    return kernel_size, stride, dilation, bool(rng.random() < 0.35)


def random_tiles(case: Case, family: Family, dtype: str, seed: int) -> dict[str, Any]:
    """Draw tile arguments: none, tiles that the configuration queries list, or small tiles that the backend accepts."""
    rng = np.random.default_rng([seed, 3])
    source = rng.choice(["none", "listed", "any"])
    if source == "none":
        return {}
    case = case.fitted(family)
    width_v = case.head_dim_v or case.head_dim
    shape = (case.batch, *case.layout)
    arrays = (
        jax.ShapeDtypeStruct((*shape, case.heads, case.head_dim), dtype),
        jax.ShapeDtypeStruct((*shape, case.heads_kv, case.head_dim), dtype),
        jax.ShapeDtypeStruct((*shape, case.heads_kv, width_v), dtype),
    )
    problem = neighborhood_problem(case.rank, Inputs(*arrays), WindowArguments(**case.window_arguments))  # type: ignore[arg-type]
    backend, device = backends.find(family.fna, "fna"), devices.default_device()
    tiles: dict[str, Any] = {}
    for pass_ in PASSES:
        configs = family.query("fna", pass_)(*arrays, **case.window_arguments)
        drawn = rng.integers(1, 10, (2, case.rank)).tolist()
        pair = tuple(drawn[0]), tuple(drawn[1])
        if configs and (source == "listed" or not backend.offers(problem, device, pass_, pair)):
            pair = tile_pair(configs[int(rng.integers(len(configs)))])
        if configs:
            tiles.update(zip(tile_names(pass_), pair, strict=True))
    return tiles


def feature_cases() -> dict[str, Case]:
    """Return problems by name. Each problem tests one feature or one known pitfall."""
    return {
        "window-odd": Case((37,), (7,)),
        "window-even": Case((37,), (8,)),
        "window-of-one": Case((19,), (1,)),
        "window-of-one-causal": Case((4, 5), (1, 1), is_causal=(True, False)),
        "window-nearly-the-layout": Case((33,), (32,), heads=2),
        "window-whole-in-one-dimension": Case((6, 9), (6, 3), stride=(4, 2)),
        "window-whole-causal-in-2d": Case((5, 6), (5, 6), is_causal=(True, False)),
        "window-much-smaller-than-tile": Case((150,), (2,), stride=(2,)),
        "window-larger-than-tile": Case((300,), (190,), stride=(7,)),
        "many-tiles-1d": Case((1500,), (1100,), stride=(3,)),
        "many-tiles-1d-causal": Case((1500,), (700,), stride=(5,), is_causal=(True,), head_dim_v=16),
        "many-tiles-2d": Case((43, 45), (30, 37), stride=(4, 1), is_causal=(True, False)),
        "many-tiles-2d-dilated": Case((41, 50), (9, 24), dilation=(4, 2), stride=(1, 5)),
        "many-tiles-3d": Case((11, 13, 14), (8, 11, 9), stride=(1, 2, 9)),
        "layout-of-one-token": Case((1, 1), (1, 1)),
        "extents-of-one": Case((1, 13, 1), (1, 5, 1)),
        "stride": Case((29,), (9,), stride=(4,)),
        "stride-is-window": Case((30,), (7,), stride=(7,)),
        "stride-blocked": Case((32,), (8,), stride=(8,)),
        "stride-causal": Case((41,), (10,), stride=(3,), is_causal=(True,)),
        "dilation": Case((36,), (5,), dilation=(4,)),
        "dilation-not-divisible": Case((37,), (3,), stride=(2,), dilation=(10,)),
        "dilation-fills-the-layout": Case((17,), (8,), dilation=(2,)),
        "dilation-groups-of-one": Case((11,), (1,), dilation=(11,)),
        "dilation-causal-2d": Case((13, 10), (3, 2), stride=(2, 1), dilation=(4, 3), is_causal=(True, False)),
        "causal": Case((50,), (13,), is_causal=(True,)),
        "causal-per-dimension": Case((5, 6, 7), (3, 4, 5), is_causal=(False, True, False)),
        "causal-everywhere": Case((4, 5, 6), (3, 3, 4), stride=(2, 1, 3), is_causal=(True, True, True)),
        "2d": Case((14, 15), (5, 6), batch=2, heads=2, heads_kv=2),
        "3d": Case((5, 7, 6), (3, 4, 5), stride=(1, 3, 2), batch=2),
        "3d-dilated": Case((7, 6, 9), (3, 2, 4), stride=(2, 1, 3), dilation=(2, 3, 2), heads=2),
        "2d-long-and-narrow": Case((2, 90), (2, 11), stride=(1, 4)),
        "cut": Case((37,), (8,), edges=("cut",)),
        "cut-dilation": Case((37,), (5,), stride=(2,), dilation=(7,), edges=("cut",)),
        "cut-2d": Case((13, 14), (6, 5), edges=("cut", "shift"), head_dim_v=24, additional=3),
        "wrap": Case((37,), (8,), edges=("wrap",)),
        "wrap-stride": Case((38,), (9,), stride=(4,), edges=("wrap",), batch=2, heads=4, heads_kv=2),
        "wrap-dilation": Case((36,), (5,), stride=(3,), dilation=(4,), edges=("wrap",)),
        "wrap-2d": Case((13, 14), (6, 13), edges=("wrap", "wrap"), head_dim_v=24, additional=3),
        "wrap-in-longitude": Case((12, 18), (5, 7), edges=("cut", "wrap"), dilation=(1, 2), heads=2),
        "wrap-3d": Case((6, 7, 10), (3, 6, 4), edges=("shift", "cut", "wrap"), stride=(1, 4, 2), scales=(0.3,)),
        "gqa": Case((25,), (7,), batch=2, heads=6, heads_kv=2),
        "mqa": Case((5, 5), (3, 3), heads=5, heads_kv=1),
        "head-dim-v-larger": Case((26,), (5,), head_dim=8, head_dim_v=40),
        "head-dim-v-smaller": Case((26,), (5,), head_dim=48, head_dim_v=16),
        "head-dim-odd": Case((23,), (5,), head_dim=19, head_dim_v=7),
        "head-dim-one": Case((23,), (5,), head_dim=1),
        "head-dim-128": Case((21,), (9,), head_dim=128),
        "head-dim-256": Case((12,), (5,), head_dim=256, head_dim_v=136),
        "additional": Case((24,), (5,), additional=7, batch=2, heads=4, heads_kv=2),
        "additional-fused": Case((24,), (5,), additional=7, fused=True, batch=2, heads=4, heads_kv=2),
        "additional-one-fused": Case((6, 7), (3, 3), additional=1, fused=True, is_causal=(True, False)),
        "additional-many-fused": Case((4, 5), (3, 2), additional=150, fused=True, head_dim_v=24),
        "additional-whole-layout": Case((4, 5), (4, 5), additional=3),
        "additional-whole-layout-causal": Case((17,), (17,), additional=3, is_causal=(True,)),
        "additional-whole-layout-causal-fused": Case((17,), (17,), additional=3, is_causal=(True,), fused=True),
        "scale-operand": Case((20,), (6,), scales=(-0.35,), additional=2, heads=2),
        "scales-of-heads": Case(
            (7, 9), (3, 4), is_causal=(True, False), scales=(0.3, -0.5, 0.0, 1.7), heads=4, heads_kv=4, batch=2
        ),
        "scales-of-grouped-heads": Case(
            (24,), (5,), additional=7, fused=True, scales=(0.3, -0.5, 0.0, 1.7), heads=4, heads_kv=2, batch=2
        ),
        "scales-of-wide-heads": Case((40,), (30,), stride=(3,), scales=(0.09, 0.05), heads=2, heads_kv=2, head_dim=128),
        "scales-additional": Case((4, 5), (3, 2), additional=50, fused=True, scales=(0.2, 0.4), heads=2, heads_kv=2),
        "scales-merged": Case((24,), (5,), additional=7, scales=(0.2, 0.4), heads=2, heads_kv=1),
        "scales-whole-layout": Case((4, 5), (4, 5), additional=3, scales=(0.2, 0.4), heads=2, heads_kv=1),
        "scale-zero": Case((20,), (6,), scale=0.0, additional=2),
        "scale-negative": Case((20,), (6,), scale=-0.35, additional=2, fused=True),
    }


def attention_cases() -> dict[str, Case]:
    """Return plain attention problems by name."""
    cases = {}
    for (queries, keys), is_causal in itertools.product(
        ((1, 1), (16, 16), (70, 33), (33, 150), (1, 40)), (False, True)
    ):
        name = f"{queries}x{keys}{'-causal' if is_causal else ''}"
        cases[name] = Case((keys,), queries=queries, is_causal=(is_causal,), head_dim=16)
    cases["many-tiles-causal"] = Case((1300,), queries=700, is_causal=(True,))
    cases["many-tiles"] = Case((600,), queries=1100, head_dim=16)
    cases["gqa"] = Case((40,), queries=25, batch=2, heads=6, heads_kv=2, head_dim=24, head_dim_v=40)
    cases["mqa-causal"] = Case((40,), queries=65, heads=4, is_causal=(True,), head_dim=17, head_dim_v=3)
    cases["scales"] = Case((40,), queries=25, batch=2, heads=4, heads_kv=2, scales=(0.3, -0.5, 0.0, 1.7), head_dim=24)
    cases["scale"] = Case((20,), queries=20, scale=-0.2, batch=3)
    return cases
