"""Execution of a call on several devices: splitting and halo exchange.

- ``explicit``: splits a call over the mesh axes in the array types (``AxisType.Explicit``).
- ``auto``: splits a pass if XLA's partitioner shards its arrays (``AxisType.Auto``). Its class ``HeadSplit``, which
  ``explicit`` also uses, assigns to each device the key/value heads that the device's query heads read.
- ``_jax_internals``: wraps undocumented parts of JAX.
- ``halos``: exchanges keys and values between devices if token dimensions are split.

These modules do not run a pass themselves: callers supply a function that runs it. The modules import
:mod:`natten_jax.cost_model`, to decide whether to overlap computation with the halo exchange, and packages of lower
levels.
"""
