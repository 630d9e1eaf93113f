"""JAX transformations of a call: differentiation, batching, lowering for a platform, and sharding.

- ``custom_vjp``: the differentiable operator, which covers all backends, and its forward and backward passes.
- ``primitive``: the JAX primitive of a pass, with its rules for ``jax.vmap``, derivatives and lowering.
- ``kernel_operands``: conversion between the arrays of a call and the arrays of its kernels.
- ``strips``: wrapped keys as separate passes, and the merge of passes over disjoint sets of keys.

Requests and operands must be validated by the caller. Imports :mod:`natten_jax.backends`, :mod:`natten_jax.sharding`
and lower levels.
"""
