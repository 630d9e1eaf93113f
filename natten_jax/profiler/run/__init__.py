"""The program that the options describe, compiled and measured.

- ``inputs``, ``split``: arrays, and their shards on several devices.
- ``workload``: the program, its sub-calls and their plans.
- ``measure``: run the program and sum up its launches.
"""
