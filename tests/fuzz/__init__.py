"""Differential fuzzing: random problems, as many as there is time for, against the float64 oracle.

``python -m tests.fuzz --help`` in the repository's root says how.
"""
