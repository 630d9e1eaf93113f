"""The native libraries: symbols, rejected calls, and calling conventions."""
