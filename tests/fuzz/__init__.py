"""Differential fuzzing: compare results of random problems with a float64 oracle, up to a problem or time limit.

``python -m tests.fuzz --help`` in the repository's root lists the options.
"""
