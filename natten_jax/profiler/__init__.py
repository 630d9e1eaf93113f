"""Measure the operators on this machine: ``python -m natten_jax.profiler --help``."""

from natten_jax.profiler.cli.arguments import parse
from natten_jax.profiler.options import Options
from natten_jax.profiler.run.measure import Comparison, Result, Row, compare, profile

__all__ = ["Comparison", "Options", "Result", "Row", "compare", "parse", "profile"]
