"""Tests of the Flax modules."""
