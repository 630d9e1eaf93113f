"""The arrays of a pass."""
