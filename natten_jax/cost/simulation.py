"""What a pass of a problem comes to with one pair of tiles."""

from __future__ import annotations

import dataclasses
import math

from natten_jax.cost import small_windows
from natten_jax.cost.axis_tiles import Placement
from natten_jax.cost.calibration import Calibration
from natten_jax.cost.predict import predict
from natten_jax.cost.tile_counts import TileCounts, count_tiles
from natten_jax.cost.work import all_pairs, flops, least_bytes
from natten_jax.passes import Pass, TilePair, outer_and_inner
from natten_jax.problem import ELEMENT_BYTES, Problem


@dataclasses.dataclass(frozen=True)
class Simulation:
    """What a pass of a problem comes to with a pair of tiles.

    Attributes:
        problem: The problem.
        pass_: The pass.
        pair: Query and key/value tile.
        placement: Where inner tiles start.
        counts: Tiles and pairs per batch element and head.
        seconds: Predicted device time; ``None`` where nothing was calibrated.
    """

    problem: Problem
    pass_: Pass
    pair: TilePair
    placement: Placement
    counts: TileCounts
    seconds: float | None

    @property
    def flops(self) -> int:
        """Floating-point operations that the mask leaves."""
        return flops(self.problem, self.pass_)

    @property
    def executed_flops(self) -> int:
        """Floating-point operations that are computed, on masked pairs and padding, too."""
        return self.flops * self.counts.executed_pairs // self.counts.visible_pairs

    @property
    def flop_bound(self) -> float:
        """Speedup over self attention if time were the operations that the mask leaves."""
        return all_pairs(self.problem) / self.counts.visible_pairs

    @property
    def tile_bound(self) -> float:
        """Speedup over self attention if time were the operations that the tiles execute."""
        return all_pairs(self.problem) / self.counts.executed_pairs

    @property
    def least_bytes(self) -> int:
        """Bytes that inputs and results take: each is moved from or to memory at least once."""
        return least_bytes(self.problem, self.pass_)

    @property
    def tile_bytes(self) -> int:
        """Bytes of all outer and inner tiles: what is loaded, mostly from the device's cache."""
        problem = self.problem
        outer, inner = (math.prod(tile) for tile in outer_and_inner(self.pair, self.pass_))
        tokens = self.counts.outer * outer + self.counts.inner * inner
        width = problem.head_dim + problem.head_dim_v
        return problem.batch * problem.heads * tokens * width * ELEMENT_BYTES[problem.dtype]


def simulate(
    problem: Problem,
    pair: TilePair,
    pass_: Pass = "forward",
    *,
    calibration: Calibration | None = None,
    placement: Placement = "anchored",
) -> Simulation:
    """Count a pass and, with a calibration, predict its time.

    Example:
        >>> from natten_jax import simulator
        >>> problem = simulator.problem_of((256, 256), kernel_size=80, heads=24, head_dim=128)
        >>> model = simulator.calibration_for("hopper", compute_capability=(9, 0))
        >>> 0 < simulator.simulate(problem, ((16, 8), (16, 8)), calibration=model).seconds < 0.1
        True

    Args:
        problem: The problem.
        pair: Query and key/value tile shape.
        pass_: The pass.
        calibration: The time model, of :func:`calibration_for`; without one no time is predicted.
        placement: Where inner tiles start; see :func:`count_tiles`.

    Raises:
        ValueError: A tile or the placement is not valid.
    """
    kernel = None if calibration is None else calibration.kernel(problem, pair, pass_)
    counts = count_tiles(problem, pair, pass_, placement=placement, kernel=kernel)
    seconds = None
    if calibration is not None and calibration.family == small_windows.FAMILY:
        seconds = small_windows.seconds(problem, pass_, pair, calibration.compute_capability)
    if seconds is None and calibration is not None and kernel is not None:
        seconds = float(predict(problem, counts.tiles, pass_, kernel, calibration))
    return Simulation(problem, pass_, pair, placement, counts, seconds)
