"""Devices, and what is decided for a pass."""
