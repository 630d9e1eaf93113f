"""The program that the options describe: its inputs and its split over devices, compiled and measured.

- ``inputs``, ``split``: its arrays, and where they lie on several devices.
- ``workload``: the program, its sub-calls and the plans that run them.
- ``measure``: runs it, and sums up what it launched.
- ``duration``: how long that will take.
"""
