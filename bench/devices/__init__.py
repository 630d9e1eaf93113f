"""Shared code of the multi-device benchmarks: splits, halo exchange times, and predictions."""
