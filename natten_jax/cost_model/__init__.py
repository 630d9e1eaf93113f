"""Cost model of attention passes, usable without a device: exact counts of work and tiles, and predicted times.

- ``calibration``: coefficients of the time model, measured on a device; its files are in ``calibrations``.
- ``tiles``: counts of query-key pairs, operations, bytes and tiles of a pass.
- ``small_windows``: predicted times of the kernels for small windows, computed by native code.
- ``simulation``: predicted times of passes, ranking of tile pairs, and TPU chips.
- ``halos``: passes whose token dimensions are sharded over devices.

:mod:`natten_jax.simulator` is the public interface. The modules import :mod:`natten_jax.native` (for the limits of
kernels) and lower levels. They do not import backends, so that every backend can use them.
"""
