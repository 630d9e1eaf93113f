"""Halo exchange: devices receive keys and values from their neighbors if token dimensions are split over devices.

- ``exchange``: finds the devices along each token dimension, and exchanges all halos before a pass. Inside
  ``jax.shard_map`` the exchange is a single operation that JAX can differentiate and batch.
- ``overlap``: exchanges halos slab by slab during a pass, and decides whether a pass does so.

:mod:`natten_jax.halo` computes the extents of halos.
"""
