"""The ``flex`` backend, plain JAX: it runs everywhere, and is differentiated to any order.

- ``backend``: what it states, and the passes.
- ``operands``, ``axes``, ``hulls``, ``blocks``: arrays cut into tiles, which tiles see which, and their masks.
- ``forward``, ``gradients``, ``tangents``: sweeps over the tiles, by ``loops``.
- ``query_sweep``: what sweeps over query tiles load.
- ``bias``: what is added to logits, and its gradients.
- ``softmax``, ``rows``: logits to weights; rows found anew whose logits are large.
- ``shapes``: words for the shapes of its arrays.
"""
