"""Measured configurations: which tiles and kernel schedules were fastest on a device.

- ``tables``: tables of measured passes, those of the package in ``measured``, and the lookup of a call.
- ``configurations``: measured configurations as arguments of the operators, or in force in a block of code.
- ``tune``: :func:`natten_jax.tune`, which measures.

The modules are on three levels. Backends look configurations up in ``tables``, which imports only what is below
backends; ``configurations`` imports the operators, and ``tune`` imports the profiler.
"""
