"""The ``tpu`` backend: Pallas kernels for TPUs, proven in Pallas's interpreter and by the TPU compiler.

- ``backend``: what it takes, and its tiles.
- ``visits``: which boxes of keys a tile of queries visits along one token dimension, and the reverse.
- ``layout``: arrays as the kernels have them, heads first and dilation groups apart.
- ``kernels``: the parts that all kernels share: where a step's box lies, masks, products.
- ``forward``, ``backward``: the kernels.

The kernels' modules import Pallas, and are imported where a kernel is built. Imports :mod:`natten_jax.backends.base`
and what lies below.
"""
