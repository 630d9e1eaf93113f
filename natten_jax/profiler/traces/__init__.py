"""What ran on a device: traces captured and read, launches named, and their time put to passes of a program.

- ``capture``, ``trace_files``: a run under JAX's profiler, and the files that it leaves.
- ``events``, ``program``, ``xspace``, ``protobuf``: what is read from them and from compiled programs.
- ``symbols``, ``collectives``: names of launches, and which of them exchange data.
- ``attribution``: which program an event belongs to, and which share of the time.
"""
