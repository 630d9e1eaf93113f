"""The public operators."""
