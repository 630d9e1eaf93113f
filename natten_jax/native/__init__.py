"""The boundary to native code: nothing else loads the native module or makes a custom call.

- ``module``: loads the library, registers its targets, calls them, and says what is missing.
- ``abi``: a problem, its tiles and its boxes as kernels have them, with three token dimensions; which kernels merge
  what they find with what was found before.
- ``head_scales``: the scales of heads as kernels take them.
- ``cuda_version``: the CUDA that kernels were compiled with, beside that of JAX's plugin.

It changes with ``csrc/ffi``. Imports problems, :mod:`natten_jax.plan` and :mod:`natten_jax.arrays`; which kernel is
called, and when, :mod:`natten_jax.backends` knows.
"""
