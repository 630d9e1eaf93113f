"""The ``flex`` backend, in plain JAX: it runs on every device, and JAX can differentiate it to any order.

- ``backend``: the backend class. Its passes and derivatives are loops over tiles, called sweeps.
- ``geometry``: cuts token layouts into tiles, computes which keys of a tile are visible, and loops over tiles.
- ``operands``: cuts the arrays of a call into tiles, and looks up the biases of the logits.
- ``softmax``: computes softmax weights from logits, in both passes.
"""
