"""The boundary to native code: nothing else loads the native module or makes a custom call.

- ``module``: loads the library, registers its targets, calls them, and says what is missing; problems, tiles and boxes
  as kernels have them, with three token dimensions.

It changes with ``csrc/ffi``. Imports problems, :mod:`natten_jax.plan` and :mod:`natten_jax.arrays`; which kernel is
called, and when, :mod:`natten_jax.backends` knows.
"""
