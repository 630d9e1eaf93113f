"""Configurations of a problem: which there are, trials that find the fastest, and tables of them for whole programs."""
