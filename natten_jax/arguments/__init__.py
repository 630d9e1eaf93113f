"""What users pass, checked before anything else reads it.

- ``static``: numbers, flags and tuples that are known when a call is traced, and how they are shown in messages.
- ``scale``: the factor of the logits, a number or an array.
- ``boxes``: where a box of queries begins, and how much of a layout is real.
- ``token_axes``: mesh axes that token dimensions are split over.
- ``natten_names``, ``other_names``: arguments as NATTEN and other libraries call them.
- ``spelled_options``: options that many functions take alike, shown by name in the signature of each.
- ``stand_ins``: objects that stand for arrays, such as Flax's parameters.
- ``symbolic_batch``: a batch that an exported program leaves open.
- ``memo``: what the checks of a call found, kept for the next one like it.

Every public function needs these, whatever it computes: so they know nothing of problems, and import nothing of this
package.
"""
