"""The arrays of a pass, whoever computes it.

- ``operands``: the tuples that passes take and give.
- ``added_logits``: numbers of biases and sinks that hide keys.
- ``remainders``: logsumexps in base 2, to more digits than one float32 number has.
- ``roles``: what their dimensions are, and so which of them a mesh may split.
- ``query_box``: some of a device's queries, as a box.
- ``key_bias_columns``, ``shared_key_bias``: biases of keys as kernels take them that know none, or those of heads.
- ``shared_table``: a relative bias of all batch entries, likewise.
- ``padding``: which tokens are none, and zeros in the place of others.
- ``avals``: types of arrays on a mesh, and what ``jax.shard_map`` asks of them.
- ``bitcast``: 16-bit arrays as words, to copy parts of them.
- ``in_place``: memory that is written in place, kept apart from what is read.

Backends, execution and sharding share them, so that none of these has to know another. Imports nothing else of this
package.
"""
