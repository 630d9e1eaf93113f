"""The public operators: signatures, documentation, checks, and the calls that follow from them.

- ``neighborhood``, ``attention``, ``merge``: the functions that users call.
- ``options``: their keyword arguments, as overloads have them.
- ``calls``: from their arguments to operators and back.
- ``sub_calls``, ``run_sub_call``: the attention calls that a call consists of, one or two, and their arrays.
- ``boxes``: where queries lie in the layout, what of it is real, and finer grids.
- ``biases``, ``sinks``: what is added to logits, and to the sum of their exponentials.
- ``float8``, ``quantization``, ``straight_through``: arrays of 8-bit floats, and calls that make them.
- ``neighborhood_weights``: neighborhood attention in two halves, with the weights in between.
- ``arrays``, ``attention_kwargs``, ``heads_first``, ``ignored_arguments``: checks and warnings.
- ``config_queries``, ``tuned``: which configurations there are, and those that a search has found.

:mod:`natten_jax` shows what is public of them. Imports everything below; profiler, doctor and the Flax modules stand
above.
"""
