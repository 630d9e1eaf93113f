// Choice of the boxes in which tiles are loaded if dimensions wrap (tile_boxes.h). Launches use the boxes. Python uses
// their cost to rank tiles, even in builds without kernels.
#pragma once

#include <cstdint>

#include "natten_jax/problem.h"

namespace natten_jax {

/// Boxes into which tiles are divided, and their cost.
struct SeamBoxes {
  std::int64_t extent[kRank];  ///< Extents of a box.
  double times;                ///< Cost: time of a pass relative to a pass without seams.
};

/// Chooses the boxes with which a pass is fastest. With smaller boxes, a pass needs fewer tiles, but a tile has more
/// boxes.
///
/// Args:
///   problem: a problem, whose dimensions may wrap.
///   tile: shape of the inner tiles, which are divided into boxes.
///   outer: shape of the outer tiles.
SeamBoxes choose_seam_boxes(const Problem& problem, const std::int64_t (&tile)[kRank],
                            const std::int64_t (&outer)[kRank]);

}  // namespace natten_jax
