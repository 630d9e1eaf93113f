"""The TPU kernels as a CPU backend: Pallas lowers them to operations that XLA runs.

``pytest -p tests.support.interpreted_tpu_family -k interpreted`` runs the family tests with this backend. Pallas's own
interpreter detects races, but operators cannot use it, because it cannot be part of a compiled program.
``tests/fuzz/interpreted.py`` uses that interpreter for direct calls of the backend.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import unittest.mock
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental.pallas import tpu as pltpu

from natten_jax import backends
from natten_jax.arrays.operands import Cotangents, Gradients, Operands, Saved
from natten_jax.backends.base import Earlier, Platform
from natten_jax.backends.pallas._tpu_call import Call
from natten_jax.backends.pallas._tpu_grid import Chunk, matrix
from natten_jax.backends.pallas.tpu import TpuBackend
from natten_jax.plan.plan import Plan

_BY_XLA: Any = True
#: Pallas's interpreter: memory is NaN until it is written, and races between copies and computations are reported.
FINDING_RACES = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")


class InterpretedTpuBackend(TpuBackend):
    """The TPU kernels, run on the CPU."""

    family = "interpreted"
    capabilities = dataclasses.replace(TpuBackend.capabilities, platform=Platform("cpu"))
    interpreter = _BY_XLA

    def forward(self, plan: Plan, operands: Operands, *, saves: bool = False, earlier: Earlier | None = None) -> Saved:
        with pltpu.force_tpu_interpret_mode(self.interpreter):
            return super().forward(plan, operands, saves=True)

    def backward(self, plan: Plan, operands: Operands, saved: Saved, cotangents: Cotangents) -> Gradients:
        with pltpu.force_tpu_interpret_mode(self.interpreter):
            return super().backward(plan, operands, saved, cotangents)


@contextlib.contextmanager
def finding_races() -> Iterator[None]:
    """Run direct calls of the backend in Pallas's own interpreter, which detects races.

    Raises:
        RuntimeError: The interpreter found a race.
    """
    InterpretedTpuBackend.interpreter = FINDING_RACES
    try:
        with unittest.mock.patch.object(Chunk, "read", _chunk_of_all), raising_races():
            yield
    finally:
        InterpretedTpuBackend.interpreter = _BY_XLA


@contextlib.contextmanager
def raising_races() -> Iterator[None]:
    """Raise an error if Pallas's interpreter printed that it found a race.

    Wait for results within the context: the interpreter may otherwise print after the context has ended.

    Raises:
        RuntimeError: The interpreter found a race.
    """
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        yield
    if "RACE DETECTED" in printed.getvalue():
        raise RuntimeError(printed.getvalue())


def _chunk_of_all(chunk: Chunk, call: Call, ref: Any) -> jax.Array:
    """Read a whole box and slice out a chunk's keys: Pallas's interpreter does not support reshaped references."""
    keys = matrix(ref)
    return jax.lax.dynamic_slice(keys, (chunk.start, 0), (call.chunks.keys, keys.shape[1]))


def register() -> None:
    """Register the backend, once per process."""
    if InterpretedTpuBackend.family not in (backend.family for backend in backends.registered()):
        backends.register(InterpretedTpuBackend())
