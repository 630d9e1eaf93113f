"""Configurations of a problem: which there are, trials that find the fastest, and tables of them for whole programs.

- ``configurations``, ``choices``: which there are, and options with one of them filled in.
- ``trials``, ``optimize``, ``optimum``: they are measured, the search for the fastest, and what it found.
- ``calls``, ``tune``: the passes of a function, and the search for each of them.
"""
