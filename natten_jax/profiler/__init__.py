"""Measure the operators on this machine: ``python -m natten_jax.profiler --help``.

- ``options``: what to profile and how; ``element_types`` and ``baselines`` are some of its choices.
- ``messages``: errors, warnings and progress on standard error.
- ``cli``: the command line.
- ``run``: the program that the options describe, compiled and measured.
- ``traces``: what ran on the device.
- ``search``: configurations, and the fastest of them.
- ``report``: what is shown and saved.
- ``__main__``, ``trace``: the two programs.

It uses the operators as users do, and reads plans from compiled programs. Only :mod:`natten_jax.doctor` imports it.
"""

from natten_jax.profiler.cli.arguments import parse
from natten_jax.profiler.options import Options
from natten_jax.profiler.run.measure import Comparison, Result, Row, compare, profile

__all__ = ["Comparison", "Options", "Result", "Row", "compare", "parse", "profile"]
