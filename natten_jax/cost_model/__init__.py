"""The cost of attention without a device: exact counts of its work and tiles, and predicted times.

- ``calibration``: coefficients of the time model, measured on a device; its files are in ``calibrations``.
- ``tiles``: query-key pairs, operations, bytes and tiles of a pass.
- ``small_windows``: the kernels for small windows, whose time native code predicts.
- ``simulation``: predicted times of passes, ranked pairs of tiles, TPU chips.
- ``halos``: passes whose token dimensions are split over devices.

:mod:`natten_jax.simulator` is the public interface. The modules import :mod:`natten_jax.native`, for the limits of
kernels, and lower levels, but no backend, so that each backend can use them.
"""
