// Boxes in which a tile is loaded. If a dimension wraps, a tile that crosses its end (a seam) is not a box of the
// array. So the tile is divided into small boxes, which begin at either side of seams and never cross them. Tokens of a
// tile are stored box by box.
#pragma once

#include <cstdint>

#include "cuda/common/device_axis.h"
#include "natten_jax/problem.h"

namespace natten_jax {

/// Maximum number of boxes of a tile, when each box is a single token.
inline constexpr int kMostBoxes = 128;

/// Division of a tile into boxes.
struct TileBoxes {
  bool go_around;            ///< True if a dimension wraps; if not, a tile is one box.
  int count;                 ///< Boxes of a tile.
  int tokens;                ///< Tokens of a box.
  int extent[3];             ///< Extents of a box.
  uchar4 begin[kMostBoxes];  ///< First token of each box in the tile: x, y, z.
};

/// Position of the `i`th token of a tile.
CUTLASS_HOST_DEVICE int3 place_in_boxes(const TileBoxes& boxes, int i) {
  const int box = i / boxes.tokens, in_box = i - box * boxes.tokens, line = in_box / boxes.extent[2];
  // Tokens past the tile get a position outside of it.
  const uchar4 begin = box < boxes.count ? boxes.begin[box] : make_uchar4(255, 0, 0, 0);
  return {begin.x + line / boxes.extent[1], begin.y + line % boxes.extent[1], begin.z + in_box % boxes.extent[2]};
}

/// Beginning of the tiles of a dimension, such that no box crosses a seam. The tiles must contain the tokens from
/// `begin` to `end`.
CUTLASS_HOST_DEVICE int begin_at_seam(const DeviceAxis& axis, int box, int begin, int end) {
  if (axis.ends != Ends::kWrap) return begin;
  const int length = axis.kv_group_tokens;
  if (begin >= 0 && end <= length) return begin;
  // Distance to the seam, forwards or backwards.
  const int distance = begin < 0 ? begin : begin - length;
  return begin - (distance >= 0 ? distance % box : (box - -distance % box) % box);
}

/// Boxes of the inner tiles of a kernel, which it iterates over for each outer tile.
///
/// Args:
///   problem: its dimensions may wrap.
///   tile: shape of the inner tiles.
///   outer: shape of the outer tiles.
TileBoxes boxes_of_tiles(const Problem& problem, const std::int64_t (&tile)[kRank], const std::int64_t (&outer)[kRank]);

}  // namespace natten_jax
