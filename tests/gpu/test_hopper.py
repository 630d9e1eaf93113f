"""What only an NVIDIA GPU shows of the Hopper kernels: command buffers, very large arrays, their names in traces.

Their results are checked with those of every other family in ``test_operators.py``.
"""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.profiler import ProfileData

import natten_jax
from tests.support import oracle
from tests.support.families import BOUNDS

pytestmark = pytest.mark.gpu

#: Turns every sequence of kernels into a CUDA graph, however short.
COMMAND_BUFFERS: dict[str, Any] = {
    "xla_gpu_enable_command_buffer": "FUSION,CUSTOM_CALL",
    "xla_gpu_graph_min_graph_size": 1,
}


def draw(seed: int, *shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def graph_launches(run: Any) -> int:
    """How many CUDA graphs a function launches, from a trace of the driver's calls."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        (path,) = Path(folder).glob("**/*.xplane.pb")
        profile = ProfileData.from_file(str(path))
    return sum("GraphLaunch" in event.name for plane in profile.planes for line in plane.lines for event in line.events)


def test_calls_in_command_buffers_follow_their_buffers() -> None:
    def program(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, ...]:
        first = natten_jax.na2d(query, key, value, 7, backend="hopper-fna")
        second, logsumexp = natten_jax.na2d(
            first, key, value, (5, 9), (2, 3), is_causal=(True, False), backend="hopper-fna", return_lse=True
        )
        return first, second, logsumexp

    # Lengths that no tile divides; enough sets that their addresses change between launches.
    sets = [tuple(draw(3 * i + j, 1, 33, 47, 4, 64) for j in range(3)) for i in range(4)]
    plain = jax.jit(program).lower(*sets[0]).compile(compiler_options={"xla_gpu_enable_command_buffer": ""})
    graphed = jax.jit(program).lower(*sets[0]).compile(compiler_options=COMMAND_BUFFERS)
    expected = [jax.tree.map(np.asarray, plain(*arrays)) for arrays in sets]
    held = []
    for repeat in range(5):
        for i in np.random.default_rng(repeat).permutation(len(sets)):
            arrays = tuple(jnp.array(array, copy=True) for array in sets[i]) if repeat % 2 else sets[i]
            results = graphed(*arrays)
            held.append((arrays, results))
            for result, value in zip(results, expected[i], strict=True):
                np.testing.assert_array_equal(np.asarray(result), value)
    # Results are not overwritten by later launches, either.
    for i, value in zip(np.random.default_rng(4).permutation(len(sets)), held[-len(sets) :], strict=True):
        np.testing.assert_array_equal(np.asarray(value[1][1]), expected[i][1])
    assert graph_launches(lambda: graphed(*sets[0])) == 1
    assert graph_launches(lambda: plain(*sets[0])) == 0


@functools.partial(jax.jit, static_argnums=(0, 1))
def hashed(seed: int, shape: tuple[int, ...]) -> jax.Array:
    """Numbers between -1.7 and 1.7 of their places (murmur3's finalizer), which take no memory beside their own."""
    x = jnp.full(shape, seed * 0x9E3779B9 & 0xFFFFFFFF, jnp.uint32)
    for dimension in range(len(shape)):
        pitch = math.prod(shape[dimension + 1 :])
        x += jax.lax.broadcasted_iota(jnp.uint32, shape, dimension) * jnp.uint32(pitch)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return ((x ^ (x >> 16)).astype(jnp.float32) * (3.4 / 2**32) - 1.7).astype(jnp.bfloat16)


def check_large_arrays(
    batch: int, layout: tuple[int, ...], heads: int, kernel_size: tuple[int, ...], dilation: tuple[int, ...]
) -> None:
    """Compares the results of some queries, among them those next to the 2^31st element."""
    head_dim, rank = 128, len(layout)
    tokens = batch * math.prod(layout)
    query, key, value = (hashed(i, (batch, *layout, heads, head_dim)) for i in range(3))
    operator = getattr(natten_jax, f"na{rank}d")
    out, logsumexp = operator(query, key, value, kernel_size, dilation=dilation, backend="hopper-fna", return_lse=True)

    rng = np.random.default_rng(0)
    boundary = 2**31 // (heads * head_dim)  # the token in which the 2^31st element lies
    sample = {0, 1, tokens - 1, tokens - 2, *(boundary + np.arange(-2, 3)), *rng.integers(0, tokens, 40)}
    take = jax.jit(lambda array, rows: array.reshape(-1, *array.shape[1 + rank :])[rows])

    def rows(array: jax.Array, indices: Any) -> np.ndarray:
        return np.asarray(take(array, np.asarray(indices)), np.float64)

    errors = []
    for token in map(int, sample):
        entry, *position = np.unravel_index(token, (batch, *layout))
        lines = []
        for at, extent, window, step in zip(map(int, position), layout, kernel_size, dilation, strict=True):
            length = len(range(at % step, extent, step))
            lines.append([at % step + step * j for j in oracle.window(at // step, length, window, 1, False)])
        seen = np.ravel_multi_index(np.meshgrid([entry], *lines, indexing="ij"), (batch, *layout)).ravel()
        logits = np.einsum("hd,khd->hk", rows(query, [token])[0], rows(key, seen)) * head_dim**-0.5
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        total = weights.sum(-1, keepdims=True)
        expected = np.einsum("hk,khd->hd", weights / total, rows(value, seen))
        expected_lse = (np.log(total) + logits.max(-1, keepdims=True))[:, 0]
        errors += [
            np.linalg.norm(rows(out, [token])[0] - expected) / np.linalg.norm(expected),
            np.linalg.norm(rows(logsumexp, [token])[0] - expected_lse) / np.linalg.norm(expected_lse),
        ]
    assert max(errors) < BOUNDS["bfloat16"]


@pytest.mark.parametrize(
    "problem", [(1, (264_001,), 64, (9,), (2,)), (5, (33, 70, 64), 23, (3, 4, 5), (1, 3, 2))], ids=["1d", "3d"]
)
def test_arrays_of_more_than_2_31_elements(problem: tuple[Any, ...]) -> None:
    """In a process of its own: one keeps what it ever had of a GPU, and others beside it were left without."""
    batch, layout, heads, *_ = problem
    elements = batch * math.prod(layout) * heads * 128
    assert elements > 2**31
    stats = jax.devices()[0].memory_stats() or {}
    if stats.get("bytes_limit", 0) < 9 * elements:
        pytest.skip(f"needs {9 * elements / 2**30:.0f} GiB of a device's memory")
    program = f"from tests.gpu.test_hopper import check_large_arrays; check_large_arrays(*{problem})"
    root = Path(__file__).parents[2]
    finished = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr


@pytest.mark.parametrize("additional_kv", [1, 48, 97, 128, 300])
@pytest.mark.parametrize(
    ("head_dim", "q_tile", "kv_tile"), [(64, 192, 128), (64, 192, 48), (128, 128, 96), (128, 64, 48)]
)
def test_additional_tokens_end_within_tiles(additional_kv: int, head_dim: int, q_tile: int, kv_tile: int) -> None:
    arrays = [draw(i, 1, n, 2, head_dim) for i, n in enumerate((250, 250, 250, additional_kv, additional_kv))]

    @jax.jit
    def program(query: jax.Array, key: jax.Array, value: jax.Array, keys: jax.Array, values: jax.Array) -> Any:
        return natten_jax.na1d(
            query,
            key,
            value,
            70,
            additional_keys=keys,
            additional_values=values,
            q_tile_shape=(q_tile,),
            kv_tile_shape=(kv_tile,),
            backend="hopper-fna",
            return_lse=True,
        )

    operands = oracle.Tensors(*(np.asarray(array, np.float64) for array in arrays))
    mask = oracle.neighborhood_mask((250,), (70,), (1,), (1,), (False,))
    expected = oracle.forward(operands, mask, head_dim**-0.5)
    for result, reference in zip(program(*arrays), expected, strict=True):
        distance = np.linalg.norm(np.asarray(result, np.float64) - reference)
        assert distance <= BOUNDS["bfloat16"] * np.linalg.norm(reference)


@pytest.mark.parametrize(
    ("arguments", "operation"),
    [
        ("-i 16 24 -n 2 -d 64 -w 5 7 --dtype bf16 --backend hopper-fna", "FnaForward"),
        ("-i 300 -n 2 -d 96 --dtype fp16 --fmha-backend hopper-fmha", "FmhaForward"),
    ],
)
def test_profiler_names_the_kernels(arguments: str, operation: str, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    command = [sys.executable, "-m", "natten_jax.profiler", *arguments.split(), "--json", str(path)]
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    finished = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert finished.returncode == 0, finished.stderr
    rows = json.loads(path.read_text())["rows"]
    (attention,) = [row for row in rows if row["category"] == "attention"]
    assert (attention["framework"], attention["arch"], attention["operation"]) == ("CUTLASS", "Sm90", operation)
    assert attention["calls"] == 1
    assert 0 < attention["runtime"] < 1e-3
    assert operation in finished.stdout
