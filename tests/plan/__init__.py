"""Devices, and plans of passes."""
