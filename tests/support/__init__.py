"""What tests share: the oracle, problems and their arrays, backend families, and programs for fresh interpreters."""
