"""Capabilities of backends, and backend selection."""
