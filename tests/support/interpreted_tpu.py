"""The TPU kernels as a backend of the host: XLA runs what Pallas makes of them.

``pytest -p tests.support.interpreted_tpu -k interpreted`` runs the tests of a family with it. Pallas's own interpreter,
which finds races, cannot be compiled into the programs of the operators: ``tests/backends/test_tpu_kernels.py`` has it.
"""

from __future__ import annotations

from typing import Any

from jax.experimental.pallas import tpu as pltpu

from natten_jax import backends
from natten_jax.arrays.operands import Gradients, Operands, Output, Saved
from natten_jax.backends.base import Platform
from natten_jax.backends.tpu.backend import TpuBackend
from natten_jax.plan.plan import Plan

_BY_XLA: Any = True


class InterpretedTpuBackend(TpuBackend):
    """The same kernels, on a host."""

    family = "interpreted"
    platform = Platform("cpu")

    def forward_saving(self, plan: Plan, operands: Operands) -> Saved:
        with pltpu.force_tpu_interpret_mode(_BY_XLA):
            return super().forward_saving(plan, operands)

    def backward(self, plan: Plan, operands: Operands, saved: Saved, cotangents: Output) -> Gradients:
        with pltpu.force_tpu_interpret_mode(_BY_XLA):
            return super().backward(plan, operands, saved, cotangents)


backends.register(InterpretedTpuBackend())
