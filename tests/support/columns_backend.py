"""A CPU backend whose caller encodes key biases in extra columns of queries and keys, as for some GPU kernels."""

from __future__ import annotations

import dataclasses
from typing import Any

from natten_jax.arrays.operands import Operands
from natten_jax.backends.cpu import CpuBackend
from natten_jax.plan.plan import Plan

LARGEST_HEAD_DIM = 64


class ColumnsBackend(CpuBackend):
    """CPU kernels that accept only head dimensions that are multiples of 8, and key biases only as extra columns."""

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
