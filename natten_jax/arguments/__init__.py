"""Validation of user arguments, before any other code reads them.

- ``static``: numbers, flags and tuples that are known at trace time, and their formatting in error messages;
  warnings that point at a user's line.
- ``arrays``: arguments that may be arrays (scales, query boxes, extents), and mesh axes of token dimensions.
- ``names``: argument names of NATTEN and other libraries, and options that signatures list by name.

These modules do not depend on problems, because every public function uses them.
"""
