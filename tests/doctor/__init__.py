"""Tests of the installation check."""
