"""The CPU kernels as a backend that takes key biases as extra head-dimension columns, as GPU kernels do."""

from __future__ import annotations

import dataclasses
from typing import Any

from natten_jax.arrays.operands import Operands
from natten_jax.backends.cpu import CpuBackend
from natten_jax.plan.plan import Plan

LARGEST_HEAD_DIM = 64


class ColumnsBackend(CpuBackend):
    """Supports head dimensions that are multiples of 8, and takes key biases as extra columns."""

    family = "columns"
    capabilities = dataclasses.replace(
        CpuBackend.capabilities,
        wraps_by_strips=True,
        needs_columns=lambda _: True,
        head_dim_step=8,
        largest_head_dim=LARGEST_HEAD_DIM,
    )

    def call_forward(self, plan: Plan, operands: Operands, *arguments: Any) -> Any:
        assert operands.inputs.key_bias is None and not plan.problem.key_bias
        return super().call_forward(plan, operands, *arguments)

    def call_backward(self, plan: Plan, operands: Operands, *arguments: Any) -> Any:
        assert operands.inputs.key_bias is None and not plan.problem.key_bias
        return super().call_backward(plan, operands, *arguments)


BACKEND = ColumnsBackend()
