"""The keys and values that neighbors hold, where token dimensions are split over devices.

- ``device_line``: the devices along one token dimension.
- ``slabs``: how tokens move along it.
- ``exchange``: the halos of all dimensions, brought before a pass computes.
- ``pipeline``: the same slab by slab, while it computes.
- ``overlap``: what is computed meanwhile.
- ``halo_passes``: which of the two a pass does.
- ``manual_exchange``: the exchange as one operation that JAX differentiates and batches.

Which keys these are is :mod:`natten_jax.halo`'s to say.
"""
