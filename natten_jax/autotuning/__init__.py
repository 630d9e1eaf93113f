"""Measured configurations: which tiles and kernel schedules were fastest on a device.

- ``tables``: tables of measured passes, including the package's tables in ``measured``, and the lookup of a call.
- ``configurations``: measured configurations as operator arguments, or active in a block of code.
- ``tune``: :func:`natten_jax.tune`, which measures.

The modules form three levels. Backends look configurations up in ``tables``, which imports only modules below backends;
``configurations`` imports the operators, and ``tune`` imports the profiler.
"""
