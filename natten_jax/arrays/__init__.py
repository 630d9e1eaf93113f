"""Operands and results of a pass, in forms that do not depend on the backend.

- ``operands``: named tuples of operands and results, the roles of their dimensions, and abstract result types.
- ``biases``: biases in the forms that backends take, and the values of biases that hide keys (mask them out).
- ``boxes``: boxes of queries within a layout, and masks of padding.
- ``remainders``: logsumexps in base 2, and their rounding errors.

The packages ``backends``, ``execution`` and ``sharding`` share these modules, which import only
:mod:`natten_jax.problem` from the rest of the package.
"""
