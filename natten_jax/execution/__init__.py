"""JAX transformations of a call: differentiation, batching, lowering for a platform, and sharding.

- ``custom_vjp``: the differentiable operator, which can run on any backend, and its forward and backward passes.
- ``primitive``: the JAX primitive of a pass, with its rules for ``jax.vmap``, derivatives and lowering.
- ``kernel_operands``: conversion between the arrays of a call and the arrays of its kernels.
- ``strips``: additional passes over wrapped keys, and the merge of passes over disjoint sets of keys.

The caller must have validated the requests and the operands. This package imports :mod:`natten_jax.backends`,
:mod:`natten_jax.sharding`, and packages at the levels below these two.
"""
