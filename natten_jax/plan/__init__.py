"""The request of a call, and the decisions for each of its passes on a device.

- ``devices``: kinds of devices, and the devices of this process.
- ``plan``: the request before a backend is chosen; backend, tiles and schedule of a pass, and their encoding in the
  metadata of a compiled program.

These modules only hold data: :mod:`natten_jax.backends.select` makes the decisions. Imports the problem, the
performance arguments and :mod:`natten_jax.arguments`.
"""
