"""The ``tpu`` backend: Pallas kernels for TPUs, proven in Pallas's interpreter and by the TPU compiler.

- ``backend``: what it takes.
- ``visits``: which boxes of keys a tile of queries visits along one token dimension, and the reverse.
- ``tiles``: which tiles are fastest, by a model of what the kernels execute.
- ``chunks``: the keys of a box that are multiplied with at a time.
- ``packs``: narrow heads that lie side by side; ``layout``: arrays as the kernels have them, dilation groups apart.
- ``kernels``: the facts of a call, and what all kernels share; ``boxes``, ``masks``: which keys a step has, and which
  of them are hidden; ``query_programs``: the grid of kernels that own queries.
- ``forward``, ``backward``: the kernels.

The kernels' modules import Pallas, and are imported where a kernel is built. Imports :mod:`natten_jax.backends.base`
and what lies below.
"""
