"""Validation of user arguments, before any other code reads them.

- ``static``: validates numbers, flags and tuples that must be known at trace time, formats values for error messages,
  and issues warnings that point at the user's line.
- ``arrays``: validates arguments that may be arrays (scales, offsets of queries, extents), and mesh axes of token
  dimensions.
- ``names``: explains unknown keyword arguments, such as names of other libraries, and checks arguments of NATTEN that
  have no effect here.

From the rest of the package, these modules import only :mod:`natten_jax.element_types`. Windows, problems and operators
can therefore import these modules.
"""
