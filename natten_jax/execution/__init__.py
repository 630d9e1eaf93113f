"""How JAX sees a call: differentiated, batched, lowered for a platform, and split.

- ``custom_vjp``: one differentiable operator over every backend, and the passes that it consists of.
- ``primitive``: what one equation of a traced program computes, and the JAX primitive that it is.
- ``kernel_operands``: the arrays of a pass as its kernels take them, and results as the call has them.
- ``strips``: keys behind the ends of dimensions that wrap, and the merge of passes over some of the keys.

It takes requests and operands that are checked. Imports :mod:`natten_jax.backends`, :mod:`natten_jax.sharding` and what
lies below.
"""
