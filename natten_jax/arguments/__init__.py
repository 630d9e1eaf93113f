"""What users pass, checked before anything else reads it.

- ``static``: numbers, flags and tuples that are known when a call is traced, and how they are shown in messages.
- ``arrays``: arguments that may be arrays: scales, boxes of queries, extents; and mesh axes of token dimensions.
- ``names``: arguments as NATTEN and other libraries call them, and options that signatures show by name.

Every public function needs these, whatever it computes: so they know nothing of problems.
"""
