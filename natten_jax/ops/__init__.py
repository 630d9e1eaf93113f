"""The public operators: signatures, documentation, argument checks, and the attention calls that they make.

- ``neighborhood``, ``attention``, ``merge``: the functions that users call.
- ``calls``: their shared implementation.
- ``canonicalize``: checks of arrays (inputs, biases, sinks) and of the positions of queries.
- ``sub_calls``: the one or two attention calls that an operator call is split into, and their arrays.
- ``float8``: quantization to 8-bit floats, and calls on 8-bit arrays.
- ``neighborhood_weights``: neighborhood attention in two steps, with the attention weights as an array in between.
- ``config_queries``: lists of the tile configurations of backends.

:mod:`natten_jax` exports the public names. This package may import all lower levels; the profiler, the doctor and the
Flax modules import this package.
"""
