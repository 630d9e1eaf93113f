"""Public module that exports :func:`natten_jax.tune`."""

from __future__ import annotations

from natten_jax.autotuning.tune import tune

__all__ = ["tune"]
