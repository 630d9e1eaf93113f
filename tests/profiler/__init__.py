"""The profiler, as a user runs it."""
