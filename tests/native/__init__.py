"""Tests of the native libraries: symbols, rejected calls, kernel limits, and C++ programs."""
