"""The ``blackwell`` backend: Pallas (Mosaic GPU) kernels for data-center GPUs of compute capability 10.0 and 10.3.

- ``backend``: what it takes.
- ``tiles``: which tiles it has, and their order.
- ``visits``: which boxes of keys a tile of queries visits along one token dimension.
- ``layout``: arrays as lines of tokens, of which copies take pieces.
- ``call``: the facts of a call, and where the work items of its grid lie.
- ``memory``, ``copies``, ``masks``: memory and barriers, tiles of tokens on their way, and what windows hide.
- ``loads``, ``products``, ``softmax``: what the warps do that copy tiles, issue products, and own rows of logits.
- ``forward``: the kernel that these make.
- ``backward``: the kernels of the backward pass.

The modules from ``memory`` on import Pallas, and are imported where a kernel is built: JAX has what they need from
0.12 on. Imports :mod:`natten_jax.backends.base` and what lies below.
"""
