"""The keys and values that neighbors hold, where token dimensions are split over devices.

- ``exchange``: the devices along each token dimension, and halos that are brought before a pass computes; inside
  ``jax.shard_map`` as one operation that JAX differentiates and batches.
- ``overlap``: halos that arrive slab by slab while a pass computes, and which passes do so.

Which keys these are is :mod:`natten_jax.halo`'s to say.
"""
