"""Differential fuzzing: random problems compared with the float64 oracle, until a count or time limit.

``python -m tests.fuzz --help`` in the repository's root lists the options.
"""
