// Choice of the boxes in which tiles are loaded if dimensions wrap, and its cost. Launches use it, and Python ranks
// tiles with it, even in builds without kernels.
#pragma once

#include <cstdint>

#include "natten_jax/problem.h"

namespace natten_jax {

/// Boxes of a tile.
struct SeamBoxes {
  std::int64_t extent[kRank];  ///< Extents of a box.
  double times;                ///< Time of a pass, relative to a pass in which seams cost nothing.
};

/// Boxes with which a pass is fastest: smaller boxes need fewer tiles, but more boxes.
///
/// Args:
///   problem: its dimensions may wrap.
///   tile: shape of the inner tiles.
///   outer: shape of the outer tiles.
SeamBoxes choose_seam_boxes(const Problem& problem, const std::int64_t (&tile)[kRank],
                            const std::int64_t (&outer)[kRank]);

}  // namespace natten_jax
