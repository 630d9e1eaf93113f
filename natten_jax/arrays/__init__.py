"""The arrays of a pass, whoever computes it.

- ``operands``: the tuples that passes take and give, what their dimensions are, and abstract types of results.
- ``biases``: what is added to logits, in the forms that backends take; numbers that hide keys.
- ``boxes``: parts of layouts, as boxes, and padding.
- ``remainders``: logsumexps in base 2, to more digits than one float32 number has.

Backends, execution and sharding share them, so that none of these has to know another. Imports nothing else of this
package.
"""
