"""The kernels that only the scaling benchmark uses compute attention, whatever the length."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from natten_jax.native import module as native

pytest.importorskip("matplotlib")
sys.path.append(str(Path(__file__).parents[2] / "bench"))

from benchmarks import Benchmark
from fmha import ladder as fmha_ladder
from fmha.ladder import BOUNDS, GPU_LADDER, error_of
from fmha.targets import LADDER_TILES, TARGETS

TARGET = "natten_jax_bench_fmha_forward"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(native.missing(TARGET) is not None, reason="built without NATTEN_JAX_BENCH=1"),
]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("tokens", [1, 63, 200, 384])
@pytest.mark.parametrize("label", ["1", "2", "3"])
@pytest.mark.parametrize("tiles", LADDER_TILES)
def test_rung(
    tiles: tuple[int, int],
    label: str,
    tokens: int,
    is_causal: bool,
    head_dim: int,
    dtype: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = next(target for target in TARGETS if target.tiles == tiles)
    monkeypatch.setattr(fmha_ladder, "target_of", lambda compute_capability: target)
    benchmark = Benchmark((tokens,), 3, head_dim, is_causal=is_causal, batch=2, dtype=dtype)
    keys = jax.random.split(jax.random.key(tokens), 3)
    arrays = tuple(jax.random.normal(key, benchmark.shape, dtype) for key in keys)
    (step,) = (step for step in GPU_LADDER.steps if step.label == label)
    out = jax.jit(step.make(benchmark))(*arrays)
    assert np.isfinite(np.asarray(out, np.float32)).all()
    assert error_of(out, arrays, is_causal) <= BOUNDS[dtype]
