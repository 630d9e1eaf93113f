"""Measure the operators on this machine: ``python -m natten_jax.profiler --help``.

- ``options``: the problem, how to profile it, and the command line that describes both.
- ``cli``: shared by the command line programs, such as messages and the exit status.
- ``capture``: run programs under JAX's profiler, and read traces.
- ``program``: compiled programs and their instructions; ``symbols``: names of launches.
- ``measure``: compile the program that the options describe, and sum up its launches by name.
- ``baselines``: self attention of other libraries; ``report``: tables and files.
- ``predict``: list and simulate configurations; ``search``: find the fastest configuration, also for whole programs.
- ``__main__``, ``trace``: the two programs.

This package calls the public operators, and reads plans from compiled programs. Only :mod:`natten_jax.doctor` imports
it.
"""

from natten_jax.profiler.measure import Result, Row, compare, profile
from natten_jax.profiler.options import Options, parse

__all__ = ["Options", "Result", "Row", "compare", "parse", "profile"]
