"""Cost model of attention passes, usable without a device: exact counts of work and tiles, and predicted times.

- ``calibration``: coefficients of the time model, read from the files in ``calibrations``.
- ``tiles``: counts of query-key pairs, operations, bytes and tiles of a pass.
- ``small_windows``: predicted times of the kernels for small windows. Native code computes them.
- ``simulation``: predicted times of passes, a ranking of tile pairs by these times, and the specifications of TPU
  chips.
- ``halos``: predicted times of passes whose token dimensions are sharded over devices.

:mod:`natten_jax.simulator` is the public interface. The modules import :mod:`natten_jax.native`, for the limits of the
kernels, and lower-level modules. They do not import backends, so that every backend can import them.
"""
