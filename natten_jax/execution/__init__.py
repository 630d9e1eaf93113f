"""How JAX sees a call: differentiated, batched, lowered for a platform, and split.

- ``taylor``: rules of ``jax.experimental.jet``.
- ``custom_vjp``: one differentiable operator over every backend.
- ``passes``: which computations a pass consists of, and how arrays become their arguments and results.
- ``computations``, ``primitive``: what one equation of a traced program computes, and the JAX primitive that it is.
- ``differentiable_forward``: the forward pass in plain JAX and its derivative, as computations.
- ``entries``: batch entries one after the other, where a backend takes but one layout.
- ``kernel_operands``: the arrays of a pass as its kernels take them, and results as the call has them.
- ``conversion``: 8-bit arrays in wider elements, for backends that take none.
- ``strips``: keys behind the ends of dimensions that wrap, for kernels that know none.
- ``head_widths``: zeros behind heads that are narrower than kernels' heads.
- ``merge_saved``: the merge of forward passes on some of the keys each.
- ``refused_derivatives``: what kernels cannot differentiate, refused in this library's words.
- ``checkpoint_names``, ``debug_nans``: what is told to ``jax.checkpoint``, and what ``jax.debug_nans`` asks.

It takes requests and operands that are checked. Imports :mod:`natten_jax.backends`, :mod:`natten_jax.sharding` and what
lies below.
"""
