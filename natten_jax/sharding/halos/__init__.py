"""Halo exchange: devices receive keys and values from their neighbors if token dimensions are split over devices.

- ``exchange``: finds the devices along each token dimension, and exchanges all halos before a pass. Inside
  ``jax.shard_map`` the exchange is a single operation that JAX can differentiate and batch.
- ``overlap``: exchanges halos during a pass, one slab (the keys from one device) at a time, and decides for each pass
  whether to do so.

:mod:`natten_jax.halo` computes the extents of halos.
"""
