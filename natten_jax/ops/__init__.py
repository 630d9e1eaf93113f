"""The public operators: signatures, documentation, argument checks, and the attention calls that the operators make.

- ``neighborhood``, ``attention``, ``merge``: the functions that users call.
- ``calls``: the shared implementation of ``neighborhood`` and ``attention``.
- ``canonicalize``: checks of arrays (inputs, biases, sinks) and of the positions of queries.
- ``sub_calls``: the one or two attention calls that an operator call is split into, and their arrays.
- ``float8``: quantization to 8-bit floats, and calls on 8-bit arrays.
- ``neighborhood_weights``: neighborhood attention in two steps. The first step returns the attention weights as an
  array, the second step applies them to values.
- ``config_queries``: functions that list the tile configurations of backends.

:mod:`natten_jax` exports the public names. This package may import packages of all lower levels. The profiler, the
doctor and the Flax modules import this package.
"""
