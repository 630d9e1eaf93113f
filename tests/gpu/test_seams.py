"""Windows that wrap in kernels for NVIDIA GPUs, against the oracle: seams anywhere in what a tile or region sees."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from natten_jax import na2d
from natten_jax.performance import PASSES, Pass, TilePair, tile_names
from natten_jax.plan import devices
from tests.fuzz.problem import Fuzzed
from tests.support.families import Family, family_named
from tests.support.problems import Case, Trial, check_all

pytestmark = pytest.mark.gpu

_HALVES = ("bfloat16", "float16")

#: Pairs of tiles for each element type.
_TRIALS = 2

#: All wrap in some dimension.
AROUND = {
    "sequence": Case((300,), (40,), heads=2, heads_kv=2, head_dim=32, batch=2),
    "short sequence": Case((21,), (19,), heads=3, heads_kv=3, head_dim=64, batch=2),
    "next to whole": Case((16, 17), (15, 16), heads=2, heads_kv=2, head_dim=32),
    "image": Case((24, 40), (7, 7), heads=2, heads_kv=2, head_dim=32, batch=3),
    "wide image": Case((30, 31), (13, 13), heads=2, heads_kv=2, head_dim=64, batch=2),
    "wide heads": Case((19, 29), (5, 9), heads=2, heads_kv=1, head_dim=128),
    "small image": Case((9, 9), (7, 8), heads=8, heads_kv=8, head_dim=32, batch=4),
    "longitude": Case((18, 36), (5, 9), edges=("cut", "wrap"), heads=4, heads_kv=4, head_dim=64),
    "latitude": Case((36, 18), (9, 5), edges=("wrap", "shift"), heads=4, heads_kv=2, head_dim=32),
    "dilated": Case((32, 51), (7, 5), dilation=(2, 3), heads=2, heads_kv=2, head_dim=32),
    "far apart": Case((60, 45), (3, 3), dilation=(12, 9), heads=2, heads_kv=2, head_dim=32),
    "strided": Case((27, 30), (6, 8), stride=(3, 5), heads=2, heads_kv=2, head_dim=32),
    "grouped heads": Case((18, 23), (5, 5), heads=6, heads_kv=2, head_dim=32, batch=2),
    "narrow heads": Case((20, 24), (5, 7), heads=3, heads_kv=3, head_dim=24, head_dim_v=40),
    "additional": Case((20, 24), (5, 7), heads=4, heads_kv=2, head_dim=32, additional=5),
    "scales": Case((19, 17), (5, 3), heads=4, heads_kv=2, head_dim=32, scales=(0.3, -0.5, 0.0, 8e-4)),
    "clip": Case((5, 12, 13), (3, 5, 5), heads=2, heads_kv=2, head_dim=32),
    "causal in time": Case(
        (5, 12, 14), (3, 5, 5), is_causal=(True, False, False), edges=("shift", "wrap", "wrap"), head_dim=64
    ),
    "volume": Case((8, 9, 10), (5, 5, 5), dilation=(1, 1, 2), heads=2, heads_kv=2, head_dim=64),
    "many entries": Case((12, 16), (5, 5), heads=4, heads_kv=4, head_dim=32, batch=24),
}


def _case(name: str) -> Case:
    case = AROUND[name]
    return case if case.edges is not None else dataclasses.replace(case, edges=("wrap",) * len(case.layout))


def _pairs(case: Case, dtype: str, family: Family, pass_: Pass) -> list[TilePair]:
    problem = Fuzzed(family.name, case, dtype, 0).description()
    backend, device = family.backend, devices.default_device()
    return list(backend.tile_pairs(backend.widened(problem, device, pass_), device, pass_))


def _trials(name: str, family: Family) -> list[Trial]:
    """The problem with the tiles that it has by default, and with others."""
    rng = np.random.default_rng(0)
    case = _case(name).fitted(family)
    found = []
    for dtype in _HALVES:
        pairs = {pass_: _pairs(case, dtype, family, pass_) for pass_ in PASSES}
        for i in range(_TRIALS):
            tiles: dict[str, Any] = {}
            for pass_ in PASSES:
                number = 0 if i == 0 else int(rng.integers(len(pairs[pass_])))
                tiles |= dict(zip(tile_names(pass_), pairs[pass_][number], strict=True))
            found.append(Trial(case, dtype, i, tiles))
    return found


@pytest.mark.parametrize("kernels", ["cutlass", "hopper"])
@pytest.mark.parametrize("name", AROUND)
def test_windows_that_wrap(name: str, kernels: str) -> None:
    of = family_named(kernels)
    trials = _trials(name, of)
    assert trials
    check_all(trials, of)


_SMALL: dict[str, Any] = {
    "q_tile_shape": (8, 2),
    "kv_tile_shape": (1, 8),
    "backward_q_tile_shape": (2, 4),
    "backward_kv_tile_shape": (4, 4),
}


@pytest.mark.parametrize(("backend", "tiles"), [("cutlass-fna", _SMALL), ("hopper-fna", {})])
def test_no_key_is_copied(backend: str, tiles: dict[str, Any]) -> None:
    shape = (2, 64, 48, 2, 64)
    arrays = [jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16) for seed in range(4)]

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        result: jax.Array = na2d(query, key, value, 7, edges="wrap", backend=backend, **tiles)
        return result

    @jax.jit
    def both_passes(cotangent: jax.Array, *inputs: jax.Array) -> Any:
        out, pullback = jax.vjp(attend, *inputs)
        return out, pullback(cotangent)

    text = both_passes.lower(*arrays).compile().as_text()
    assert text is not None
    assert not re.findall(r"bf16\[2,\d+,\d+,2,64\]\S* (?:copy|pad|concatenate|slice|dynamic-slice|fusion)\(", text)
