"""8-bit queries, keys and values for the operators (``docs/fp8.md``)."""

from __future__ import annotations

from natten_jax.ops.float8 import Quantized, quantize

__all__ = ["Quantized", "quantize"]
