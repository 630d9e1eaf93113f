"""The ``flex`` backend, plain JAX: it runs everywhere, and is differentiated to any order.

- ``backend``: what it states, and the passes: the forward pass, gradients, and tangents as sweeps over tiles.
- ``geometry``: layouts cut into tiles, which tiles see which, and loops over them.
- ``operands``: arrays in tiles, and what is added to logits.
- ``softmax``: logits to weights, in each pass.
"""
