"""The command line: flags and their checks, exit status, and files of results.

- ``flags``: all flags; ``families``: backend families that only some devices run.
- ``arguments``, ``checks``: parse the flags, check them and fill in defaults; ``parser``: shared by other programs.
- ``ignored_flags``: warn about ignored flags.
- ``printable``: text for streams of any encoding.
- ``outputs``, ``whole_files``: check that files can be written, and write them completely or not at all.
- ``quiet_exit``: exit status after a closed pipe or Ctrl-C.
"""
