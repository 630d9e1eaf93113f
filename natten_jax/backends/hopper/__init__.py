"""The ``hopper`` backend."""
