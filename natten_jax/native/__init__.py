"""The boundary to native code: the only package that loads the native module and makes custom calls.

- ``module``: loads the library, registers and calls its targets, reports missing targets, and converts problems, tiles
  and boxes to the kernels' three token dimensions.

This package must be changed together with ``csrc/ffi``. Imports :mod:`natten_jax.problem`, :mod:`natten_jax.plan` and
:mod:`natten_jax.arrays`. :mod:`natten_jax.backends` chooses the kernel to call.
"""
