"""The fixed lists of problems that ``board.py`` times: large problems for GPUs, small problems for CPUs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from benchmarks import BENCHMARKS, Benchmark

_VIDEO = BENCHMARKS["3d"]

_ON_GPUS: Mapping[str, Benchmark] = {
    "sequence": BENCHMARKS["1d"],
    "sequence, stride 256": BENCHMARKS["1d-s256"],
    "causal sequences": Benchmark((16384,), 16, 128, (1024,), is_causal=True, batch=2),
    "image": BENCHMARKS["2d"],
    "image, stride 16x16": BENCHMARKS["2d-s16"],
    "video": _VIDEO,
    "video, stride 16x8x8": BENCHMARKS["3d-s16x8x8"],
    "video, causal in time": Benchmark((30, 32, 32), 24, 128, (30, 32, 32), causal=(True, False, False)),
    "NAT, stage 1": Benchmark((56, 56), 2, 32, (7, 7), batch=64),
    "DiNAT, stage 1": Benchmark((56, 56), 2, 32, (7, 7), dilation=(8, 8), batch=64),
    "HDiT, 64x64": Benchmark((64, 64), 2, 64, (7, 7), batch=32),
    "attention": BENCHMARKS["self-2x16384"],
}

_ON_HOSTS: Mapping[str, Benchmark] = {
    name: dataclasses.replace(benchmark, dtype="float32")
    for name, benchmark in {
        "sequence": Benchmark((2048,), 2, 64, (256,)),
        "causal sequence": Benchmark((2048,), 2, 64, (256,), is_causal=True),
        "image": Benchmark((48, 48), 4, 64, (13, 13)),
        "image, stride 4x4": Benchmark((48, 48), 4, 64, (13, 13), stride=(4, 4)),
        "image, dilation 8x8": Benchmark((56, 56), 2, 32, (7, 7), dilation=(8, 8)),
        "video": Benchmark((8, 16, 16), 2, 32, (3, 7, 7)),
        "video, causal in time": Benchmark((8, 16, 16), 2, 32, (8, 7, 7), causal=(True, False, False)),
        "attention": Benchmark((1024,), 4, 64),
    }.items()
}


def problems_for(platform: str) -> Mapping[str, Benchmark]:
    """Return the problems of a platform, by display name."""
    return _ON_GPUS if platform == "cuda" else _ON_HOSTS
