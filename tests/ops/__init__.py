"""The public functions: results against the oracle, arguments, and warnings."""
