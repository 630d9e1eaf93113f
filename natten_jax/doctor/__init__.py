"""``python -m natten_jax.doctor``: report the installation, the build, and the backends that can run on this machine.

- ``__main__``: the program and its reports.
- ``backend_check``: comparison of a backend with float64, and its times.

The doctor imports the whole package; other modules do not import the doctor. It describes problems with the profiler's
flags.
"""
