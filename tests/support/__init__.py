"""Code shared by tests: the oracle, test problems with inputs, backend families, and programs in separate processes."""
