"""The tests. Folders mirror the package: what a module of `natten_jax/ops` does is tested in `tests/ops`."""
