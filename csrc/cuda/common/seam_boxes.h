// What boxes tiles are loaded in where dimensions wrap, and what that costs. Launches choose by it, and Python ranks
// tiles by it, in builds without the kernels, too.
#pragma once

#include <cstdint>

#include "natten_jax/problem.h"

namespace natten_jax {

/// Boxes of a tile.
struct SeamBoxes {
  std::int64_t extent[kRank];  ///< Extents of a box.
  double times;                ///< How many times as long a pass takes with them as if seams cost nothing.
};

/// The boxes with which a pass is fastest: the smaller they are, the fewer tiles there are, and the more boxes.
///
/// Args:
///   problem: whose dimensions may wrap.
///   tile: of tiles that some other ones walk over.
///   outer: of the tiles that walk.
SeamBoxes choose_seam_boxes(const Problem& problem, const std::int64_t (&tile)[kRank],
                            const std::int64_t (&outer)[kRank]);

}  // namespace natten_jax
