"""``python -m natten_jax.doctor``: what is installed, what was built, and which backend can run here and why.

- ``__main__``: the program.
- ``mesh_check``: tries whether an operator is split over each kind of mesh axes.
- ``scratch_memory``: memory that kernels take beside operands and results.
- ``tuned_tables``: whether configurations that were measured elsewhere are used here.

It asks everything else and nothing asks it. The flags that describe a problem are the profiler's.
"""
