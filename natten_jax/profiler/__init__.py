"""Measure the operators on this machine: ``python -m natten_jax.profiler --help``.

- ``options``: the problem and how to profile it; ``arguments``: the command line that describes them.
- ``cli``: shared by the command line programs, such as messages and the exit status.
- ``workload``: the program that the options describe, compiled; ``baselines``: self attention of other libraries.
- ``capture``: run programs under JAX's profiler, and read traces.
- ``program``: compiled programs and their instructions; ``symbols``: names of launches.
- ``measure``: launches by name; ``report``: tables and files.
- ``predict``: configurations, listed and simulated; ``search``: the fastest of them; ``tune``: those of whole programs.
- ``__main__``, ``trace``: the two programs.

It uses the operators as users do, and reads plans from compiled programs. Only :mod:`natten_jax.doctor` imports it.
"""

from natten_jax.profiler.arguments import parse
from natten_jax.profiler.measure import Result, Row, compare, profile
from natten_jax.profiler.options import Options

__all__ = ["Options", "Result", "Row", "compare", "parse", "profile"]
