"""Measured configurations: the backend, tiles and kernel schedule that were fastest on a kind of device.

- ``tables``: tables of measured passes, and the lookup of a call's passes in them. The folder ``measured`` contains the
  tables that come with the package.
- ``configurations``: converts a table to arguments of an operator, or activates it in a ``with`` block.
- ``tune``: :func:`natten_jax.tune`, which measures the configurations of a program.

The three modules are on different import levels. Backends import ``tables``, which itself imports only modules of lower
levels. ``configurations`` imports the operators, and ``tune`` imports the profiler.
"""
