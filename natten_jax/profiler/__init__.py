"""Measure the operators on this machine: ``python -m natten_jax.profiler --help``."""

from natten_jax.profiler.arguments import parse
from natten_jax.profiler.measure import Comparison, Result, Row, compare, profile
from natten_jax.profiler.options import Options

__all__ = ["Comparison", "Options", "Result", "Row", "compare", "parse", "profile"]
