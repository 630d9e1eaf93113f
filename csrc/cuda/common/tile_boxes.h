// Boxes in which a tile is loaded. If a dimension wraps, a tile may extend past its end (a seam). The tokens past the
// seam are at the other end of the array, so the tokens of such a tile are not a box of the array. So tiles are divided
// into small boxes that never cross a seam. The tokens of a tile are stored box by box.
#pragma once

#include <cstdint>

#include "cuda/common/device_axis.h"
#include "natten_jax/problem.h"

namespace natten_jax {

/// Maximum number of boxes per tile. A tile of 128 tokens has this number of boxes if each box is a single token.
inline constexpr int kMostBoxes = 128;

/// Division of a tile into boxes.
struct TileBoxes {
  bool has_seams;            ///< True if a dimension wraps. Otherwise, a tile is one box.
  int count;                 ///< Number of boxes of a tile.
  int tokens;                ///< Number of tokens of a box.
  int extent[3];             ///< Extents of a box.
  uchar4 begin[kMostBoxes];  ///< Position of each box in the tile: x, y, z.
};

/// Position of the `i`th token of a tile, in the order in which tokens are stored.
CUTLASS_HOST_DEVICE int3 position_in_boxes(const TileBoxes& boxes, int i) {
  const int box = i / boxes.tokens, in_box = i - box * boxes.tokens, line = in_box / boxes.extent[2];
  // Tokens past the last box get a position outside the tile.
  const uchar4 begin = box < boxes.count ? boxes.begin[box] : make_uchar4(255, 0, 0, 0);
  return {begin.x + line / boxes.extent[1], begin.y + line % boxes.extent[1], begin.z + in_box % boxes.extent[2]};
}

/// Index at which the tiles of a dimension begin. The tiles must contain the tokens from `begin` to `end`. The result
/// is `begin`, or a smaller index if boxes would otherwise cross a seam. `box` is the extent of a box.
CUTLASS_HOST_DEVICE int begin_at_seam(const DeviceAxis& axis, int box, int begin, int end) {
  if (axis.ends != Ends::kWrap) return begin;
  const int length = axis.kv_group_tokens;
  if (begin >= 0 && end <= length) return begin;
  // Position of `begin` relative to the seam, which is at 0 or at `length`.
  const int distance = begin < 0 ? begin : begin - length;
  return begin - (distance >= 0 ? distance % box : (box - -distance % box) % box);
}

/// Boxes of the inner tiles of a kernel. For each outer tile, the kernel iterates over inner tiles.
///
/// Args:
///   problem: a problem, whose dimensions may wrap.
///   tile: shape of the inner tiles.
///   outer: shape of the outer tiles.
TileBoxes boxes_of_tiles(const Problem& problem, const std::int64_t (&tile)[kRank], const std::int64_t (&outer)[kRank]);

}  // namespace natten_jax
