"""The tests. Folders mirror the package: tests of `natten_jax/ops` are in `tests/ops`."""
