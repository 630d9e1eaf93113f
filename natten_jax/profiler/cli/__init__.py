"""The command line: its flags, their checks, what is said on standard error, and how programs end and write files."""
