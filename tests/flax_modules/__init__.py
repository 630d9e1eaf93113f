"""The modules for Flax."""
