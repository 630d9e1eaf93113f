"""The ``flex`` backend."""
