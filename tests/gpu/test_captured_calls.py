"""Calls that XLA captures into CUDA graphs: the first call of a process, and backward passes."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import natten_jax
from natten_jax.plan import devices
from tests.support.families import family_named

from .test_hopper import COMMAND_BUFFERS, graph_launches

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
FAMILIES = ("cutlass", "hopper")
REPEATS = 5


class Program(NamedTuple):
    """A call to ``na2d``.

    Attributes:
        layout: Token layout.
        kernel_size: Window.
        operands: Names of further operands. All are differentiated, except ``extents``.
        head_dim: Elements per head.
        families: Backends that support the call.
    """

    layout: tuple[int, int]
    kernel_size: tuple[int, int]
    operands: tuple[str, ...] = ()
    head_dim: int = 64
    families: tuple[str, ...] = FAMILIES


SMALL, LARGE = (7, 7), (21, 25)
PROGRAMS = {
    "small windows": Program((33, 47), SMALL),
    "small windows with every operand": Program(
        (33, 47), SMALL, ("key_bias", "sinks", "relative_bias"), 32, families=("cutlass",)
    ),
    "small windows with extents": Program((33, 47), SMALL, ("key_bias", "sinks", "extents"), 32, families=("cutlass",)),
    "whole layouts with a relative bias": Program((7, 7), SMALL, ("relative_bias", "sinks"), 32, families=("cutlass",)),
    "large windows": Program((33, 47), LARGE),
    "large windows with a key bias and sinks": Program((33, 47), LARGE, ("key_bias", "sinks")),
    "large windows with extents": Program((33, 47), LARGE, ("key_bias", "extents")),
    "heads of 128": Program((33, 47), LARGE, ("sinks",), 128),
}
BATCH, HEADS = 2, 4


def operands_of(program: Program, seed: int) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)

    def draw(*shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), dtype)

    shape = BATCH, *program.layout, HEADS, program.head_dim
    every = {
        "key_bias": draw(BATCH, *program.layout, dtype=jnp.float32),
        "sinks": draw(HEADS, dtype=jnp.float32),
        "relative_bias": draw(HEADS, *(2 * size - 1 for size in program.kernel_size), dtype=jnp.float32),
        "extents": jnp.asarray([program.layout, (program.layout[0] - 4, program.layout[1] - 9)], jnp.int32),
    }
    return {name: draw(*shape) for name in ("query", "key", "value")} | {name: every[name] for name in program.operands}


def both_passes(program: Program, backend: str) -> Callable[[dict[str, jax.Array]], Any]:
    """Output, logsumexp and gradients, as a function of operands."""

    def run(operands: dict[str, jax.Array]) -> Any:
        differentiated = {name: array for name, array in operands.items() if name != "extents"}

        def attend(arrays: dict[str, jax.Array]) -> Any:
            every: dict[str, Any] = {**operands, **arrays}
            return natten_jax.na2d(
                **every,
                kernel_size=program.kernel_size,
                backend=backend,
                backward_deterministic=True,
                return_lse=True,
            )

        outputs, pullback = jax.vjp(attend, differentiated)
        return outputs, pullback(jax.tree.map(jnp.cos, outputs))[0]

    return run


def _skip_unless_it_runs(kernels: str) -> None:
    if not family_named(kernels).runs_on(devices.default_device()):
        pytest.skip(f"{kernels} has no kernels for this GPU")


def _cases() -> list[Any]:
    return [
        pytest.param(name, kernels, id=f"{kernels}-{name}")
        for name, each in PROGRAMS.items()
        for kernels in each.families
    ]


@pytest.mark.parametrize(("name", "kernels"), _cases())
def test_backward_passes_in_command_buffers(name: str, kernels: str) -> None:
    _skip_unless_it_runs(kernels)
    program = PROGRAMS[name]
    run = jax.jit(both_passes(program, f"{kernels}-fna"))
    sets = [operands_of(program, seed) for seed in range(3)]
    plain = run.lower(sets[0]).compile(compiler_options={"xla_gpu_enable_command_buffer": ""})
    graphed = run.lower(sets[0]).compile(compiler_options=COMMAND_BUFFERS)
    expected = [jax.tree.map(np.asarray, plain(operands)) for operands in sets]
    for repeat in range(REPEATS):
        for operands, values in zip(sets, expected, strict=True):
            # New buffers in every other round: the graph's addresses change.
            arrays = jax.tree.map(functools.partial(jnp.array, copy=True), operands) if repeat % 2 else operands
            jax.tree.map(np.testing.assert_array_equal, graphed(arrays), values)
    assert graph_launches(lambda: graphed(sets[0])) >= 1
    assert graph_launches(lambda: plain(sets[0])) == 0


def save_captured_results(name: str, kernels: str, path: str) -> None:
    """Run a program and save its results: the only program of a process, apart from copies to the GPU."""
    program = PROGRAMS[name]
    operands = operands_of(program, 0)
    results = jax.jit(both_passes(program, f"{kernels}-fna"))(operands)
    np.savez(path, *(np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(results)))


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("small windows with every operand", "cutlass"),
        ("large windows", "cutlass"),
        ("large windows with a key bias and sinks", "hopper"),
    ],
)
def test_the_first_call_of_a_process_is_captured(name: str, kernels: str, tmp_path: Path) -> None:
    """CUDA loads kernels when they are first launched, which a capture must not see."""
    _skip_unless_it_runs(kernels)
    path = tmp_path / "results.npz"
    arguments = name, kernels, str(path)
    source = f"from tests.gpu import test_captured_calls; test_captured_calls.save_captured_results(*{arguments})"
    flags = "--xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL --xla_gpu_graph_min_graph_size=1"
    environment = {
        **os.environ,
        "CUDA_MODULE_LOADING": "LAZY",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    command = [sys.executable, "-c", source]
    finished = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    program = PROGRAMS[name]
    run = jax.jit(both_passes(program, f"{kernels}-fna")).lower(operands_of(program, 0))
    plain = run.compile(compiler_options={"xla_gpu_enable_command_buffer": ""})
    expected = jax.tree.leaves(plain(operands_of(program, 0)))
    with np.load(path) as found:
        assert len(found.files) == len(expected)
        for key, value in zip(found.files, expected, strict=True):
            # XLA may sum gradients of a shared bias over the heads in another order.
            array = np.asarray(value, np.float32)
            np.testing.assert_allclose(found[key], array, rtol=0, atol=1e-5 * np.abs(array).max())
