"""The CPU kernels as a backend that wraps by strips, as GPU kernels do."""

from __future__ import annotations

import dataclasses
from typing import Any

from natten_jax.backends.cpu import CpuBackend
from natten_jax.plan.plan import Plan


class StripsBackend(CpuBackend):
    """Supports windows that are shifted or cut; wrapped dimensions run as strips."""

    family = "strips"
    capabilities = dataclasses.replace(CpuBackend.capabilities, wraps_by_strips=True)

    def call_forward(self, plan: Plan, *arguments: Any) -> Any:
        assert "wrap" not in plan.problem.edges
        return super().call_forward(plan, *arguments)

    def call_backward(self, plan: Plan, *arguments: Any) -> Any:
        assert "wrap" not in plan.problem.edges
        return super().call_backward(plan, *arguments)


BACKEND = StripsBackend()
