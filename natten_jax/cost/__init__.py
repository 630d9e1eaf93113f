"""What attention costs: counted exactly, and its time predicted, without a device.

- ``axis_sums``: sums over the tiles of one dimension, however many they are.
- ``axis_tiles``: tiles of one dimension, by what a kernel has to do with them.
- ``row_groups``: tiles by what the row groups of a kernel do with them, each on its own.
- ``tile_counts``: tiles and query-key pairs of a pass.
- ``work``: operations and bytes that no kernel can do without.
- ``calibration``: coefficients of the time model, measured on a device; its files are in ``calibrations``.
- ``predict``: the time model's formula.
- ``simulation``: counts and time of one pass with one pair of tiles.
- ``tpu_chips``: the time on kinds of TPUs, from published rates alone.
- ``halo_time``: time of exchanging halos, and whether computing meanwhile pays.
- ``local_tiles``: what devices compute of tiles where token dimensions are split.
- ``ranking``: pairs of tiles by predicted time.
- ``local_tiling``: tiles for what one of several devices computes.
- ``tile_shapes``: shapes of tiles of so many tokens.
- ``small_windows``: the form for small windows, whose time native code predicts.
- ``small_window_counts``: what that form executes and loads.
- ``stride_advice``: strides with which no tile needs a mask.
- ``dilation_advice``: dilations that are faster.

:mod:`natten_jax.simulator` is their public face. They import :mod:`natten_jax.native`, for the limits of kernels, and
what lies below: no backend, so that each backend can ask them.

A thread block owns an *outer* tile, of queries in the forward pass and of keys and values in the backward pass, and
goes over *inner* tiles of the other side. An inner tile is *full* where each of its pairs of tokens is visible,
*partial* where it needs a mask, and *skipped* where none is visible.
"""
