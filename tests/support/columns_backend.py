"""The host's kernels as a backend to which biases of keys are columns, as they are to those for GPUs."""

from __future__ import annotations

import dataclasses
from typing import Any

from natten_jax.arrays.operands import Operands
from natten_jax.backends.cpu import CpuBackend
from natten_jax.plan.plan import Plan

LARGEST_HEAD_DIM = 64


class ColumnsBackend(CpuBackend):
    """Takes heads whose width is a multiple of 8, and biases of keys as columns of them."""

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
