"""Backends of Pallas kernels: ``tpu`` for TPUs, ``blackwell`` for GPUs of compute capability 10.0 and 10.3.

- ``tpu`` and ``blackwell`` contain the backends, and rank their tiles.
- ``_common`` computes the boxes of keys that query tiles visit, array layouts, and statistics of the softmax.
- ``_tpu_call`` divides the work of a TPU call: it packs narrow heads, and divides boxes of keys into chunks.
- ``_tpu_grid`` contains the masks and the grids of programs, and ``_tpu_kernels`` contains the TPU kernels of both
  passes.
- ``_blackwell_call`` divides the work of a Blackwell call into work items, and computes the layouts of its arrays.
- ``_blackwell_memory`` contains barriers, copies of tiles, and masks, and ``_blackwell_kernels`` contains the Blackwell
  kernels of both passes.

``_tpu_grid``, ``_tpu_kernels``, ``_blackwell_memory`` and ``_blackwell_kernels`` import Pallas. They are imported only
when a kernel is built, because the Blackwell kernels require JAX 0.12. This package imports
:mod:`natten_jax.backends.base` and packages of lower levels than :mod:`natten_jax.backends`.
"""
