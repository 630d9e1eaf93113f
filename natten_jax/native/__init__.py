"""The boundary to native code: no other package loads the native module or makes custom calls.

- ``module``: loads the library, registers and calls its targets, reports missing targets, and converts problems, tiles
  and boxes to the kernels' three token dimensions.

A change of the interface to native code changes both this package and ``csrc/ffi``. This package imports
:mod:`natten_jax.problem`, :mod:`natten_jax.plan` and :mod:`natten_jax.arrays`. :mod:`natten_jax.backends` chooses the
kernel to call.
"""
