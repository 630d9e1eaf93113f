"""Differential fuzzing: compare random problems with the float64 oracle, until a problem count or time limit.

``python -m tests.fuzz --help`` in the repository's root lists the options.
"""
