"""Problems for fitting the simulator's time model, and held-back problems for testing the fitted model.

Each problem is given as arguments of the profiler. The held-back problems were chosen before the first fit.
"""

from __future__ import annotations

#: Problems that the fit uses and that are also examples in the documentation.
EXAMPLES = (
    "-i 32768 -d 128 -w 2048",
    "-i 32768 -d 128 -w 2048 -s 256",
    "-i 32768 -d 128 -w 2048 -s 2048",
    "-i 256 256 -n 24 -d 128 -w 80 80",
    "-i 256 256 -n 24 -d 128 -w 80 80 -s 16 16",
    "-i 30 48 80 -n 24 -d 128 -w 18 24 24",
    "-i 30 48 80 -n 24 -d 128 -w 18 24 24 -s 16 8 8",
)

#: Further problems that the fit uses, with other head dimensions, lengths, ranks and masks.
FITTED = (
    "-i 4096 -n 8 -d 128",
    "-i 16384 -n 16 -d 128",
    "-i 4096 -b 4 -n 32 -d 128 -c 1",
    "-i 8192 -n 16 -d 64",
    "-i 2048 -b 8 -n 16 -d 64",
    "-i 8192 -b 4 -n 32 -d 64",
    "-i 8192 -b 2 -n 16 -d 64 -c 1",
    "-i 4096 -n 16 -d 256",
    "-i 4096 -n 16 -d 192",
    "-i 64 96 -n 12 -d 192 -w 24 24",
    "-i 65536 -n 2 -d 64 -w 512",
    "-i 16384 -n 8 -d 256 -w 1024",
    "-i 16384 -n 8 -d 128 -w 256",
    "-i 8192 -n 32 --heads-kv 8 -d 128 -w 1024 -s 16 -c 1",
    "-i 128 128 -n 8 -d 128 -w 16 16",
    "-i 128 128 -n 16 -d 64 -w 48 48",
    "-i 256 256 -n 12 -d 64 -w 64 64",
    "-i 64 64 -b 4 -n 8 -d 64 -w 7 7",
    "-i 64 64 -n 16 -d 256 -w 20 20",
    "-i 256 256 -n 8 -d 128 -w 30 30 --dilation 2 2",
    "-i 16 64 64 -n 8 -d 128 -w 6 12 12",
    "-i 16 64 64 -n 8 -d 64 -w 8 16 16 -s 4 4 4",
    "-i 16 32 32 -b 4 -n 8 -d 64 -w 8 16 16",
    "-i 32 32 32 -n 8 -d 256 -w 8 8 8",
)

#: Problems with small windows, for the fit of the small-window kernels.
SMALL = (
    "-i 56 56 -b 64 -n 2 -d 32 -w 7 7",
    "-i 14 14 -b 64 -n 8 -d 32 -w 7 7",
    "-i 49 -b 64 -n 16 -d 32",
    "-i 56 56 -b 64 -n 2 -d 32 -w 7 7 --dilation 8 8",
    "-i 64 64 -b 32 -n 2 -d 64 -w 7 7",
    "-i 256 256 -b 4 -n 2 -d 64 -w 7 7",
    "-i 56 56 -b 64 -n 4 -d 32 -w 3 3",
    "-i 128 128 -b 8 -n 8 -d 64 -w 13 13",
    "-i 160 160 -b 4 -n 8 -d 32 -w 13 13",
    "-i 8 56 56 -b 4 -n 3 -d 32 -w 8 7 7",
    "-i 64 64 64 -n 4 -d 32 -w 5 5 5",
    "-i 16384 -b 2 -n 16 -d 64 -w 128 -c 1",
    "-i 256 -d 32 -w 32",
    "-i 56 56 -b 16 -n 4 -d 128 -w 7 7",
    "-i 4096 -b 8 -n 8 -d 128 -w 64",
)

#: Problems with small windows that are held back from the fit.
SMALL_HELD_BACK = (
    "-i 28 28 -b 64 -n 4 -d 32 -w 7 7",
    "-i 16 16 -d 32 -w 5 5",
    "-i 32 32 -b 8 -n 4 -d 64 -w 9 9 --dilation 2 2",
    "-i 12 24 24 -b 2 -n 4 -d 64 -w 3 5 5",
    "-i 112 112 -b 8 -n 3 -d 32 -w 11 11",
)

#: Problems that are held back from the fit.
HELD_BACK = (
    "-i 8192 -n 16 -d 64 -w 1024",
    "-i 16384 -n 8 --heads-kv 2 -d 128 -w 4096 -s 64 -c 1",
    "-i 128 128 -n 16 -d 64 -w 33 33",
    "-i 64 96 -b 2 -n 12 -d 128 -w 17 31 -s 3 2",
    "-i 256 256 -n 24 -d 128 -w 40 40 --dilation 2 2",
    "-i 16 32 32 -n 16 -d 128 -w 8 9 11",
    "-i 30 48 80 -n 24 -d 64 -w 10 16 16 -s 2 4 4",
    "-i 24 40 64 -n 8 -d 128 -w 12 16 24 -c 1 0 0",
    "-i 16384 -n 4 -d 128",
    "-i 96 96 -n 8 -d 256 -w 24 24",
)
