"""Counts and predicted times of a problem with a tile configuration, without a device.

Counts are exact (:func:`count_tiles`). The time is that of a model (:func:`predict`) that was fitted to measurements on
one kind of device (:func:`calibration_for`).

Example:
    >>> from natten_jax import simulator
    >>> problem = simulator.problem_of((256, 256), 80, stride=16, heads=24, head_dim=128)
    >>> tiles = (16, 8), (16, 8)  # query, key/value
    >>> simulator.count_tiles(problem, tiles).is_fully_block_sparse
    True
    >>> simulator.least_block_sparse_stride(problem, tiles)
    (16, 8)
"""

from __future__ import annotations

from natten_jax.cost_model.calibration import Calibration, Kernel, calibration_for
from natten_jax.cost_model.halos import Link, SplitTime, link_between, predict_split
from natten_jax.cost_model.simulation import (
    DilationRecommendation,
    Recommendation,
    Simulation,
    least_block_sparse_stride,
    predict,
    rank,
    recommend_dilation,
    recommend_stride,
    simulate,
)
from natten_jax.cost_model.tiles import TileCounts, count_tiles
from natten_jax.problem import problem_of

__all__ = [
    "Calibration",
    "DilationRecommendation",
    "Kernel",
    "Link",
    "Recommendation",
    "Simulation",
    "SplitTime",
    "TileCounts",
    "calibration_for",
    "count_tiles",
    "least_block_sparse_stride",
    "link_between",
    "predict",
    "predict_split",
    "problem_of",
    "rank",
    "recommend_dilation",
    "recommend_stride",
    "simulate",
]
