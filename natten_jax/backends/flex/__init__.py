"""The ``flex`` backend, in plain JAX: it runs on every device, and JAX can differentiate it to any order.

- ``backend``: capabilities, and the passes as sweeps over tiles: forward pass, gradients and tangents.
- ``geometry``: division of token layouts into tiles, visibility between tiles, and loops over tiles.
- ``operands``: division of arrays into tiles, and biases of the logits.
- ``softmax``: softmax weights from logits, in each pass.
"""
