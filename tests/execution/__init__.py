"""Tracing, differentiation, batching, lowering and export of the operators."""
