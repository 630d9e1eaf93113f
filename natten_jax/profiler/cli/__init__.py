"""The command line: its flags, their checks, what is said on standard error, and how programs end and write files.

- ``flags``, ``families``: the flags, and those of them that choose a backend.
- ``arguments``, ``checks``: they are read, checked, and filled in; ``parser`` has what other programs share.
- ``ignored_flags``: those that change nothing.
- ``complaints``, ``progress``, ``printable``: what is said on standard error, and how streams of any encoding have it.
- ``outputs``, ``whole_files``: whether files can be written, and files that are whole or not there.
- ``quiet_exit``: how programs end where nobody reads on.
"""
