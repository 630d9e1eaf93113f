"""Exchange of neighbors' keys and values if token dimensions are split over devices.

- ``exchange``: the devices along each token dimension, and halos that are exchanged before a pass; inside
  ``jax.shard_map`` as a single operation that JAX differentiates and batches.
- ``overlap``: halos that arrive slab by slab during a pass, and the choice of such passes.

:mod:`natten_jax.halo` computes the extents of halos.
"""
