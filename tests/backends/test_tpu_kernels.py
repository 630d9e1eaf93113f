"""The TPU kernels in Pallas's interpreter, which finds races and fills fresh memory with NaN."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from natten_jax import backends, na2d
from natten_jax.arrays.operands import Cotangents, Inputs, Operands
from natten_jax.backends.pallas import _tpu_call
from natten_jax.backends.pallas._tpu_call import pack_size
from natten_jax.backends.pallas.tpu import TpuBackend
from natten_jax.backends.select import plan_with
from natten_jax.performance import PASSES, Performance, TilePair
from natten_jax.plan.devices import Device
from natten_jax.plan.plan import Request
from natten_jax.problem import Problem, problem_of
from tests.fuzz import interpreted
from tests.support import oracle
from tests.support.families import BOUNDS, Family
from tests.support.interpreted_tpu import FINDING_RACES, InterpretedTpuBackend, raising_races, register
from tests.support.problems import Case, Trial, check_all

TPU = Device("tpu", is_present=False)

PROBLEMS: dict[str, tuple[Problem, TilePair]] = {
    "three dimensions": (
        problem_of((3, 4, 18), (2, 3, 4), (1, 2, 3), 1, (True, False, False), head_dim=16, head_dim_v=24),
        ((3, 2, 16), (2, 3, 16)),
    ),
    "attention": (
        problem_of((20,), operator="fmha", kv_layout=(25,), head_dim=8, dtype="float32", scale=-0.3),
        ((8,), (16,)),
    ),
}


@pytest.fixture
def _interpreted() -> Iterator[None]:
    with pltpu.force_tpu_interpret_mode(FINDING_RACES), raising_races():
        yield


def mask_of(problem: Problem) -> np.ndarray:
    """Which keys each query sees."""
    if problem.operator == "fmha":
        (axis,) = problem.axes
        return oracle.attention_mask(axis.query_extent, axis.kv_extent, axis.is_causal)
    return oracle.neighborhood_mask(
        problem.query_layout, problem.kernel_size, problem.stride, problem.dilation, problem.is_causal
    )


def distance(found: object, expected: np.ndarray) -> float:
    """How far a result is from what was expected, relative to the norm of that."""
    return float(np.linalg.norm(np.asarray(found, np.float64) - expected) / np.linalg.norm(expected))


@pytest.mark.usefixtures("_interpreted")
@pytest.mark.parametrize("name", PROBLEMS)
def test_results_and_gradients(name: str) -> None:
    problem, tiles = PROBLEMS[name]
    performance = Performance()
    for pass_ in PASSES:
        performance = performance.with_tiles(pass_, tiles)
    backend, request = TpuBackend(), Request(problem, performance)
    plans = {pass_: plan_with(backend, request, TPU, pass_) for pass_ in PASSES}
    rng = np.random.default_rng(len(name))

    def draw(*shape: int) -> jnp.ndarray:
        return jnp.asarray(rng.standard_normal((1, *shape)), problem.dtype)

    query, out_cotangent = (
        draw(*problem.query_layout, problem.heads, width) for width in (problem.head_dim, problem.head_dim_v)
    )
    key, value = (draw(*problem.kv_layout, problem.heads_kv, width) for width in (problem.head_dim, problem.head_dim_v))
    lse_cotangent = draw(*problem.query_layout, problem.heads).astype(jnp.float32)
    operands = Operands(Inputs(query, key, value))
    saved = backend.forward_saving(plans["forward"], operands)
    gradients = backend.backward(plans["backward"], operands, saved, Cotangents(out_cotangent, lse_cotangent))

    in_float64 = oracle.Tensors(*(np.asarray(array, np.float64) for array in (query, key, value)))
    cotangents = (np.asarray(array, np.float64) for array in (out_cotangent, lse_cotangent))
    expected = oracle.reference(in_float64, mask_of(problem), problem.scale, *cotangents)
    found = {
        "out": distance(saved.out, expected.forward.out),
        "lse": distance(saved.logsumexp, expected.forward.lse),
        **{
            f"d_{field}": distance(getattr(gradients, field), getattr(expected.gradients, field))
            for field in ("query", "key", "value")
        },
    }
    assert all(error <= BOUNDS[problem.dtype] for error in found.values()), found


@pytest.fixture
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_registered", [*backends.registered()])
    register()


@pytest.mark.usefixtures("_known")
@pytest.mark.parametrize("number", range(3))
def test_random_problems(number: int) -> None:
    """A part of what ``python -m tests.fuzz.interpreted`` runs."""
    problem = interpreted.draw(0, number)
    assert not interpreted.complaints(problem), problem


def test_races_are_found() -> None:
    """A kernel that reads what a copy may not have brought yet."""

    def kernel(x: Any, out: Any, scratch: Any, done: Any) -> None:
        copy = pltpu.make_async_copy(x, scratch, done)
        copy.start()
        out[...] = scratch[...]
        copy.wait()

    racing = pl.pallas_call(
        kernel,
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
        scratch_shapes=[pltpu.VMEM((8, 128), jnp.float32), pltpu.SemaphoreType.DMA],
        interpret=FINDING_RACES,
    )
    with pytest.raises(Exception, match="RACE DETECTED"), raising_races():
        jax.block_until_ready(racing(jnp.ones((8, 128), jnp.float32)))


@pytest.mark.usefixtures("_known")
def test_biases_of_keys() -> None:
    cases = [
        Case((24,), (5,), key_bias="tokens", hidden=0.4, heads=2, heads_kv=1, batch=2),
        Case((4, 9), (3, 4), key_bias="heads", hidden=0.6, heads=2, heads_kv=2, scales=(0.0, -0.5), additional=2),
    ]
    family = Family.of(InterpretedTpuBackend())
    check_all([Trial(case, dtype) for case in cases for dtype in family.dtypes], family)


@pytest.mark.usefixtures("_known")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packs_of_narrow_heads(dtype: str) -> None:
    """Two packs of four, one of three with unequal widths, and boxes of several chunks."""
    scales = tuple((-1) ** i * 0.1 * (i + 1) for i in range(8))
    eight = Case((5, 20), (3, 6), stride=(1, 2), batch=2, scales=scales).with_heads(8, 8)
    three = Case((41,), (9,), dilation=(2,), is_causal=(True,), head_dim=24, head_dim_v=16).with_heads(3, 3)
    large = Case((24, 64), (21, 50), is_causal=(False, True), scales=(0.3, -0.2)).with_heads(2, 2)
    cases = [dataclasses.replace(eight, head_dim=32), three, dataclasses.replace(large, head_dim=32)]
    check_all([Trial(case, dtype, seed) for seed, case in enumerate(cases)], Family.of(InterpretedTpuBackend()))


@pytest.mark.parametrize(
    ("heads", "widths", "pack"),
    [
        ((2, 2), (32, 32), 2),
        ((8, 8), (32, 32), 4),
        ((5, 5), (16, 24), 5),
        ((6, 6), (32, 32), 1),
        ((8, 8), (24, 24), 1),
        ((8, 8), (32, 16), 1),
        ((4, 2), (32, 32), 1),
        ((2, 2), (40, 32), 1),
    ],
)
def test_which_heads_are_packed(heads: tuple[int, int], widths: tuple[int, int], pack: int) -> None:
    assert pack_size(*heads, widths) == pack


@pytest.mark.usefixtures("_known")
def test_a_forgotten_mask_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("natten_jax.backends.pallas._tpu_grid.sees_all", lambda *_: jnp.bool_(True))
    assert interpreted.complaints(interpreted.draw(0, 0))


@pytest.mark.usefixtures("_known")
def test_chunks_as_the_kernels_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """By XLA, which knows reshaped references: Pallas's interpreter reads whole boxes in their place."""
    monkeypatch.setattr(_tpu_call, "FEW_ROWS_CHUNK", 48)
    query, key, value = (jax.random.normal(jax.random.key(i), (1, 20, 33, 2, 16)) for i in range(3))
    attend = functools.partial(na2d, query, key, value, (7, 9), (2, 1), (1, 2), (False, True))
    tiled = attend(backend="interpreted-fna", q_tile_shape=(4, 8), kv_tile_shape=(6, 16))
    assert jnp.abs(tiled - attend(backend="flex-fna")).max() < 1e-5
