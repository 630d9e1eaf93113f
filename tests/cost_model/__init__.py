"""Counts, modelled times, and recommendations derived from them."""
