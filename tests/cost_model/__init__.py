"""Counts, modelled times, and the advice that is drawn from them."""
