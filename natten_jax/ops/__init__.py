"""The public operators: signatures, documentation, checks, and the calls that follow from them.

- ``neighborhood``, ``attention``, ``merge``: the functions that users call.
- ``calls``: from their arguments to operators and back.
- ``canonicalize``: checks of arrays: inputs, biases, sinks, boxes of queries.
- ``sub_calls``: the attention calls that a call consists of, one or two, and their arrays.
- ``float8``: arrays of 8-bit floats, and calls that make them.
- ``neighborhood_weights``: neighborhood attention in two halves, with the weights in between.
- ``config_queries``: lists of the configurations of backends.

:mod:`natten_jax` shows what is public of them. Imports everything below; profiler, doctor and the Flax modules stand
above.
"""
