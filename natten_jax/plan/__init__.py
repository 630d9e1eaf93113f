"""Requests of attention calls, and plans of their passes on a device.

- ``devices``: kinds of devices, and the devices of this process.
- ``plan``: requests and plans. A request is a call for which no backend has been chosen yet. A plan contains the
  backend, the tiles and the schedule of a pass. Plans are encoded in the metadata of compiled programs.

These modules only define the data; :mod:`natten_jax.backends.select` makes the plans. This package imports the problem,
the performance arguments and :mod:`natten_jax.arguments`.
"""
