"""What runs where: what a call asks for, and what was decided for one of its passes on one device.

- ``devices``: what a device is, and which this process has.
- ``plan``: what a call asks for before a backend is chosen; backend, tiles and schedule of a pass, and how the metadata
  of a compiled program carries them.

These are facts alone: :mod:`natten_jax.backends.select` decides. Imports the problem, the performance arguments and
:mod:`natten_jax.arguments`.
"""
