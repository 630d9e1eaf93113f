"""``python -m natten_jax.doctor``: what is installed, what was built, and which backend can run here and why.

- ``__main__``: the program.
- ``mesh_check``: tries whether an operator is split over each kind of mesh axes.
- ``scratch_memory``: memory that kernels take beside operands and results.
- ``backend_check``: a backend's results beside float64, and its times; ``battery`` has the problems, ``reference``
  attention in float64.
- ``tuned_tables``: whether configurations that were measured elsewhere are used here.

It asks everything else and nothing asks it. The flags that describe a problem are the profiler's.
"""
