"""``python -m natten_jax.doctor``: what is installed, what was built, and which backend can run here and why.

- ``__main__``: the program and its reports.
- ``backend_check``: a backend's results compared with float64, and its times.

The doctor imports the whole package, and no module imports the doctor. Flags that describe a problem are the
profiler's.
"""
