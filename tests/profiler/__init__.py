"""Tests of the profiler through its command line."""
