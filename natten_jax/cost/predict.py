"""The predicted time of a pass, in seconds, with coefficients fitted to measurements on one kind of device.

    visiting = inner_tile * (seen tiles) + masking * (partial tiles) + skipping * (skipped tiles)
    tile = outer_tile + visiting / (outer tiles)
    work = rounds * tile
    busy = launch + max(work, byte * (bytes of inputs and results))
    time = busy * (1 + slowdown * power * busy / (busy + onset))

A tile counts as partial if any row group masks it, because they take turns. There are ``batch * heads * (outer tiles) /
(multiprocessors * side_by_side)`` rounds, rounded up; where a kernel takes its tiles from a counter, half a round is
added instead. The last line is the clock, which falls while a kernel keeps the device at its power limit: how much,
depends on the power that the kernel draws. A backward pass is several kernels and has a ``launch`` of its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from natten_jax.cost.calibration import Calibration, Kernel
from natten_jax.cost.tile_counts import TimedTiles
from natten_jax.cost.work import least_bytes
from natten_jax.performance import Pass
from natten_jax.problem import Problem


def predict(problem: Problem, tiles: TimedTiles, pass_: Pass, kernel: Kernel, calibration: Calibration) -> Any:
    """Predicted seconds of a pass.

    Example:
        >>> from natten_jax import simulator
        >>> problem = simulator.problem_of((256, 256), 80, heads=24, head_dim=128)
        >>> pair = (16, 8), (16, 8)
        >>> model = simulator.calibration_for("hopper")
        >>> kernel = model.kernel(problem, pair, "forward")
        >>> counts = simulator.count_tiles(problem, pair, kernel=kernel)
        >>> bool(0 < simulator.predict(problem, counts.tiles, "forward", kernel, model) < 0.1)
        True

    Args:
        problem: The problem.
        tiles: What is executed with one pair of tiles, or with many.
        pass_: The pass.
        kernel: The kernel that executes them.
        calibration: The time model.

    Returns:
        Seconds, one for every pair of tiles.
    """
    outer, inner, seen, partial = (np.asarray(each, np.float64) for each in tiles)
    # In the backward pass a key/value tile is worked on once for all query heads that share it.
    heads, repeats = (problem.heads, 1) if pass_ == "forward" else (problem.heads_kv, problem.heads // problem.heads_kv)
    visiting = kernel.inner_tile * seen + kernel.masking * partial + kernel.skipping * (inner - seen)
    rounds = calibration.rounds(problem.batch * heads * outer, pass_, kernel)
    tile = kernel.outer_tile + repeats * visiting / outer
    moving = calibration.byte * least_bytes(problem, pass_)
    return calibration.clocked(calibration.launch_of(pass_) + np.maximum(rounds * tile, moving), kernel)
