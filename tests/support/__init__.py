"""Shared test code: the oracle, test problems and their arrays, backend families, and programs run in new processes."""
