"""Measure the operators on this machine: ``python -m natten_jax.profiler --help``."""

from natten_jax.profiler.arguments import Options, parse
from natten_jax.profiler.measure import Result, Row, profile

__all__ = ["Options", "Result", "Row", "parse", "profile"]
