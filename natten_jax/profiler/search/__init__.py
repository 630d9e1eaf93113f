"""Configurations of a problem: which there are, and trials that find the fastest."""
