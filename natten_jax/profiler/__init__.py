"""Measure the operators on this machine: ``python -m natten_jax.profiler --help``.

- ``options``: what to profile and how, and the flags that set it.
- ``arguments``: the command line, parsed and checked.
- ``cli``: shared by the command line programs, such as messages and the exit status.
- ``baselines``: self attention of other libraries.
- ``run``: the program that the options describe, compiled and measured.
- ``capture``: run programs under JAX's profiler, and read traces.
- ``program``: compiled programs and their instructions; ``symbols``: names of launches.
- ``search``: configurations, and the fastest of them.
- ``report``: tables and files.
- ``__main__``, ``trace``: the two programs.

It uses the operators as users do, and reads plans from compiled programs. Only :mod:`natten_jax.doctor` imports it.
"""

from natten_jax.profiler.arguments import parse
from natten_jax.profiler.options import Options
from natten_jax.profiler.run.measure import Comparison, Result, Row, compare, profile

__all__ = ["Comparison", "Options", "Result", "Row", "compare", "parse", "profile"]
