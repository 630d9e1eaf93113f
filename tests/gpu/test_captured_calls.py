"""Calls that XLA captures into CUDA graphs: backward passes, and the first call in a process."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.profiler import ProfileData

from natten_jax.plan import devices
from tests.support import oracle
from tests.support.families import family_named
from tests.support.problems import Case, Shape

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
FAMILIES = ("cutlass", "hopper")
REPEATS = 5
#: Compiler options with which XLA captures all sequences of kernels into CUDA graphs, including short sequences.
COMMAND_BUFFERS: dict[str, Any] = {
    "xla_gpu_enable_command_buffer": "FUSION,CUSTOM_CALL",
    "xla_gpu_graph_min_graph_size": 1,
}


def graph_launches(run: Any) -> int:
    """Trace a function with the profiler, and return the number of CUDA graphs that it launches."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        (path,) = Path(folder).glob("**/*.xplane.pb")
        profile = ProfileData.from_file(str(path))
    return sum("GraphLaunch" in event.name for plane in profile.planes for line in plane.lines for event in line.events)


def case_of(layout: Shape, kernel_size: Shape, head_dim: int = 64, **terms: Any) -> Case:
    return Case(layout, kernel_size, batch=2, heads=4, heads_kv=4, head_dim=head_dim, **terms)


SMALL, LARGE = (7, 7), (21, 25)
BIASED: dict[str, Any] = {"key_bias": "tokens", "sinks": True}
#: Each value contains a problem, a flag, and the kernel families that support the problem. The flag is True if batch
#: entries have separate extents.
PROGRAMS: dict[str, tuple[Case, bool, tuple[str, ...]]] = {
    "small windows": (case_of((33, 47), SMALL), False, FAMILIES),
    "small windows with every operand": (
        case_of((33, 47), SMALL, 32, relative_bias=True, **BIASED),
        False,
        FAMILIES[:1],
    ),
    "small windows with extents": (case_of((33, 47), SMALL, 32, **BIASED), True, FAMILIES[:1]),
    "whole layouts with a relative bias": (
        case_of((7, 7), SMALL, 32, relative_bias=True, sinks=True),
        False,
        FAMILIES[:1],
    ),
    "large windows": (case_of((33, 47), LARGE), False, FAMILIES),
    "large windows with a key bias and sinks": (case_of((33, 47), LARGE, **BIASED), False, FAMILIES),
    "large windows with extents": (case_of((33, 47), LARGE, key_bias="tokens"), True, FAMILIES),
    "heads of 128": (case_of((33, 47), LARGE, 128, sinks=True), False, FAMILIES),
}
Operands = tuple[oracle.Tensors, jax.Array | None]


def operands_of(name: str, seed: int) -> Operands:
    """Return the operands of a problem, and the extents of its batch entries (``None`` without extents)."""
    case, has_extents, _ = PROGRAMS[name]
    height, width = case.layout
    extents = jnp.asarray([case.layout, (height - 4, width - 9)], jnp.int32) if has_extents else None
    return case.operands("bfloat16", seed), extents


def both_passes(name: str, kernels: str) -> Callable[[Operands], Any]:
    """Return a function that maps operands to output, logsumexp and gradients."""

    def run(arrays: Operands) -> Any:
        operands, extents = arrays
        operator = PROGRAMS[name][0].operator(f"{kernels}-fna", backward_deterministic=True, extents=extents)
        outputs, pullback = jax.vjp(operator, operands)
        return outputs, pullback(jax.tree.map(jnp.cos, outputs))[0]

    return run


def _skip_unless_it_runs(kernels: str) -> None:
    if not family_named(kernels).runs_on(devices.default_device()):
        pytest.skip(f"{kernels} has no kernels for this GPU")


@pytest.mark.parametrize(
    ("name", "kernels"), [(name, kernels) for name, (*_, families) in PROGRAMS.items() for kernels in families]
)
def test_backward_passes_in_command_buffers(name: str, kernels: str) -> None:
    _skip_unless_it_runs(kernels)
    run = jax.jit(both_passes(name, kernels))
    sets = [operands_of(name, seed) for seed in range(3)]
    plain = run.lower(sets[0]).compile(compiler_options={"xla_gpu_enable_command_buffer": ""})
    graphed = run.lower(sets[0]).compile(compiler_options=COMMAND_BUFFERS)
    expected = [jax.tree.map(np.asarray, plain(operands)) for operands in sets]
    held = []
    for repeat in range(REPEATS):
        for i in np.random.default_rng(repeat).permutation(len(sets)):
            # Every other round copies the operands into new buffers, so that the addresses in the graph change.
            arrays = jax.tree.map(functools.partial(jnp.array, copy=True), sets[i]) if repeat % 2 else sets[i]
            held.append((graphed(arrays), expected[i]))
    for results, values in held:  # later launches must not overwrite earlier results
        jax.tree.map(np.testing.assert_array_equal, results, values)
    assert graph_launches(lambda: graphed(sets[0])) >= 1
    assert graph_launches(lambda: plain(sets[0])) == 0


def save_captured_results(name: str, kernels: str, path: str) -> None:
    """Run both passes of a problem and save the results. The process runs no other program, except copies."""
    results = jax.jit(both_passes(name, kernels))(operands_of(name, 0))
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
    """With lazy loading, CUDA loads a kernel before its first launch. Kernels must not be loaded during a capture."""
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
    run = jax.jit(both_passes(name, kernels)).lower(operands_of(name, 0))
    plain = run.compile(compiler_options={"xla_gpu_enable_command_buffer": ""})
    expected = jax.tree.leaves(plain(operands_of(name, 0)))
    with np.load(path) as found:
        assert len(found.files) == len(expected)
        for key, value in zip(found.files, expected, strict=True):
            # If heads share a key bias, XLA may sum its gradient over the heads in a different order.
            array = np.asarray(value, np.float32)
            np.testing.assert_allclose(found[key], array, rtol=0, atol=1e-5 * np.abs(array).max())
