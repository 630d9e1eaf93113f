"""Tests of devices, and of the plans that select the backend and tiles of a pass."""
