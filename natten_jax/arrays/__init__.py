"""The arrays of a pass, independent of the backend.

- ``operands``: operand and result tuples of passes, the roles of their dimensions, and abstract result types.
- ``biases``: terms added to logits, in the forms that backends take, and the values that hide keys.
- ``boxes``: boxes within layouts, and padding.
- ``remainders``: logsumexps in base 2, with more precision than a float32 number.

Backends, execution and sharding share these modules, so that they need not import each other. Imports no other part of
this package.
"""
