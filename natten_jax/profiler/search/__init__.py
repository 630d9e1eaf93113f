"""Configurations, tried and compared."""
