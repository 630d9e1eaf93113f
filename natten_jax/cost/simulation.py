"""What a pass of a problem comes to with one pair of tiles."""

from __future__ import annotations

import dataclasses
import math

from natten_jax.cost import small_window_counts, small_windows
from natten_jax.cost.axis_tiles import Placement
from natten_jax.cost.calibration import Calibration
from natten_jax.cost.predict import predict
from natten_jax.cost.tile_counts import TileCounts, count_tiles
from natten_jax.cost.work import all_pairs, flops, least_bytes
from natten_jax.performance import Pass, TilePair, outer_and_inner
from natten_jax.problem import Problem


@dataclasses.dataclass(frozen=True)
class Simulation:
    """What a pass of a problem comes to with a pair of tiles.

    Attributes:
        problem: The problem.
        pass_: The pass.
        pair: Query and key/value tile.
        placement: Where inner tiles start.
        counts: Tiles and pairs per batch element and head. Of kernels that compute gradients of queries apart, those of
            keys and values.
        executed_flops: Floating-point operations that are computed, on masked pairs and padding, and again, too.
        tile_bytes: Bytes of all outer and inner tiles: what is loaded, mostly from the device's cache.
        seconds: Predicted device time; ``None`` where nothing was calibrated.
    """

    problem: Problem
    pass_: Pass
    pair: TilePair
    placement: Placement
    counts: TileCounts
    executed_flops: int
    tile_bytes: int
    seconds: float | None

    @property
    def flops(self) -> int:
        """Floating-point operations that the mask leaves."""
        return flops(self.problem, self.pass_)

    @property
    def flop_bound(self) -> float:
        """Speedup over self attention if time were the operations that the mask leaves."""
        return all_pairs(self.problem) / self.counts.visible_pairs

    @property
    def tile_bound(self) -> float:
        """Speedup over self attention if time were the operations that the tiles execute."""
        return self.flop_bound * self.flops / self.executed_flops

    @property
    def least_bytes(self) -> int:
        """Bytes that inputs and results take: each is moved from or to memory at least once."""
        return least_bytes(self.problem, self.pass_)


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
    kernel = None
    if calibration is not None and small_windows.is_for(calibration, problem, pass_, pair):
        # No other kernel takes such tiles.
        estimate = small_windows.estimate(calibration.family, problem, pass_, pair, calibration.compute_capability)
        if estimate is not None and placement == "anchored":
            found = small_window_counts.executed(problem, pass_, pair, estimate.launches)
            return Simulation(problem, pass_, pair, placement, *found, estimate.seconds)
    elif calibration is not None:
        kernel = calibration.kernel(problem, pair, pass_)
    counts = count_tiles(problem, pair, pass_, placement=placement, kernel=kernel)
    seconds = None
    if calibration is not None and kernel is not None:
        seconds = float(predict(problem, counts.tiles, pass_, kernel, calibration))
    executed = flops(problem, pass_) * counts.executed_pairs // counts.visible_pairs
    loaded = _tile_bytes(problem, pair, pass_, counts)
    return Simulation(problem, pass_, pair, placement, counts, executed, loaded, seconds)


def _tile_bytes(problem: Problem, pair: TilePair, pass_: Pass, counts: TileCounts) -> int:
    outer, inner = (math.prod(tile) for tile in outer_and_inner(pair, pass_))
    tokens = counts.outer * outer + counts.inner * inner
    width = problem.head_dim + problem.head_dim_v
    return problem.batch * problem.heads * tokens * width * problem.element.bytes
