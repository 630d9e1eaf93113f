"""A call on several devices: how it is split, and what devices exchange for it.

- ``explicit``: the split over mesh axes that the types of arrays name.
- ``auto``: the split that XLA's partitioner makes of a program, and of query heads beside their key/value heads.
- ``_jax_internals``: what JAX does not document, in one place.
- ``halos``: the keys and values that devices exchange where token dimensions are split.

Nothing here runs a pass: callers pass in a function that runs it. Imports :mod:`natten_jax.cost_model`, which decides
whether to compute while halos travel, and lower levels.
"""
