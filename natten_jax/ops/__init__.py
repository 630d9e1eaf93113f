"""The public operators: signatures, documentation, checks, and the calls that follow from them.

- ``neighborhood``, ``attention``, ``merge``: the functions that users call.
- ``options``: their keyword arguments, as overloads have them.
- ``calls``: from their arguments to operators and back.
- ``boxes``: where queries lie in the layout, what of it is real, and finer grids.
- ``parts``: one attention call, or two whose results are merged.
- ``arrays``, ``attention_kwargs``, ``heads_first``, ``ignored_arguments``: checks and warnings.
- ``config_queries``, ``tuned``: which configurations there are, and those that a search has found.

:mod:`natten_jax` shows what is public of them. Imports everything below; profiler, doctor and the Flax modules stand
above.
"""
