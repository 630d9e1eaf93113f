"""Neighborhood attention for Flax. The extra ``flax`` of the package also installs Flax.

Importing this package only checks that Flax is installed. Import the submodule that you need:

- :mod:`natten_jax.flax_modules.nnx`: ``NeighborhoodAttention1D``, ``2D`` and ``3D`` for :mod:`flax.nnx`.
- :mod:`natten_jax.flax_modules.linen`: modules for :mod:`flax.linen` with the same names, parameters and constructor
  arguments as the ``nnx`` modules. Only the arguments ``rngs`` and ``*_metadata`` are missing.
- :mod:`natten_jax.flax_modules.attention_fn`: ``neighborhood_attention_fn``, for the ``attention_fn`` argument of
  Flax's own ``MultiHeadAttention``.
- :mod:`natten_jax.flax_modules.convert`: functions that convert weights from the PyTorch modules of NATTEN and Hugging
  Face.

Example::

    from flax import nnx
    from natten_jax.flax_modules.nnx import NeighborhoodAttention2D

    layer = NeighborhoodAttention2D(64, num_heads=4, kernel_size=7, rngs=nnx.Rngs(0))
    output = layer(images)  # [batch, height, width, 64]
"""

import importlib.util

if importlib.util.find_spec("flax") is None:
    raise ModuleNotFoundError("natten_jax.flax_modules needs Flax: pip install 'flax>=0.12.2'", name="flax")
