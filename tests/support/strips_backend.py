"""A CPU backend whose caller computes wrapped keys in separate calls (strips), as for some GPU kernels."""

from __future__ import annotations

import dataclasses
from typing import Any

from natten_jax.backends.cpu import CpuBackend
from natten_jax.plan.plan import Plan


class StripsBackend(CpuBackend):
    """CPU kernels restricted to shifted and cut windows. Wrapped dimensions are computed in strips."""

    family = "strips"
    capabilities = dataclasses.replace(CpuBackend.capabilities, wraps_by_strips=True)

    def call_forward(self, plan: Plan, *arguments: Any) -> Any:
        assert "wrap" not in plan.problem.edges
        return super().call_forward(plan, *arguments)

    def call_backward(self, plan: Plan, *arguments: Any) -> Any:
        assert "wrap" not in plan.problem.edges
        return super().call_backward(plan, *arguments)


BACKEND = StripsBackend()
