"""Backends of Pallas kernels: ``tpu``, and ``blackwell`` for GPUs of compute capability 10.0 and 10.3.

- ``tpu``, ``blackwell``: the backends, and the ranking of their tiles.
- ``_common``: the keys that query tiles visit, array layouts, and statistics of the softmax.
- ``_tpu_call``: packs of narrow heads, chunks of keys, layouts, and the static facts of a call.
- ``_tpu_grid``: grids of programs, boxes of keys, and masks; ``_tpu_kernels``: the kernels of both passes.
- ``_blackwell_call``: arrays as lines of tokens, the static facts of a call, and its work items.
- ``_blackwell_memory``: barriers, copies of tiles, and masks; ``_blackwell_kernels``: the kernels of both passes.

``_tpu_grid``, ``_tpu_kernels``, ``_blackwell_memory`` and ``_blackwell_kernels`` import Pallas. They are imported only
when a kernel is built, because the Blackwell kernels require JAX 0.12. This package imports
:mod:`natten_jax.backends.base` and lower levels.
"""
