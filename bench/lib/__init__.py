"""Shared code of the benchmark programs: start-up, timing, records, charts, and compared implementations."""
