"""``python -m natten_jax.doctor``: report the installation, the build, and the backends that can run on this machine.

- ``__main__``: the command line program and its reports.
- ``backend_check``: compares the results of a backend with attention in float64, and measures the backend's times.

The doctor may import every other module of the package, and none of these imports the doctor. Users describe a problem
to the doctor with the flags of :mod:`natten_jax.profiler`.
"""
