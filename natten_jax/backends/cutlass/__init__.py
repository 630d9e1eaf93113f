"""The ``cutlass`` backend."""
