"""Measure the operators on this machine: ``python -m natten_jax.profiler --help``.

- ``options``: parses the command line, which describes a problem and how to profile it.
- ``cli``: messages, progress and exit status of the command line programs.
- ``capture``: runs programs under JAX's profiler, and reads launches from traces.
- ``program``: reads instructions and plans from compiled programs.
- ``symbols``: converts symbols and instructions to readable names.
- ``measure``: compiles and runs the program that the options describe, and sums the times of launches with equal names.
- ``baselines``: runs the self attention of other libraries.
- ``report``: prints tables, and writes result files.
- ``predict``: lists and simulates the configurations of a problem.
- ``search``: finds the fastest configuration of a problem, or of every problem in a program.
- ``__main__`` and ``trace``: the two command line programs. The first profiles an operator. The second summarizes an
  existing trace.

This package calls the public operators, and reads plans from compiled programs. :mod:`natten_jax.doctor` imports this
package. A call of :func:`natten_jax.tune` also imports this package.
"""

from natten_jax.profiler.measure import Result, Row, compare, profile
from natten_jax.profiler.options import Options, parse

__all__ = ["Options", "Result", "Row", "compare", "parse", "profile"]
