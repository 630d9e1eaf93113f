"""Tests of the public functions: results compared with the oracle, arguments, and errors."""
