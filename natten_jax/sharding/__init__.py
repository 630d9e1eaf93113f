"""Execution of a call on several devices: splitting and halo exchange.

- ``explicit``: splitting over the mesh axes in the types of the arrays.
- ``auto``: splitting by XLA's partitioner, and the assignment of query heads to key/value heads.
- ``_jax_internals``: wrappers around undocumented parts of JAX.
- ``halos``: exchange of keys and values if token dimensions are split.

These modules do not run a pass themselves: callers supply a function that runs it. Imports lower levels and
:mod:`natten_jax.cost_model`, which decides whether to overlap computation with the halo exchange.
"""
