// The boxes that a tile is loaded in. A tile that a seam cuts, where a dimension ends and goes on at its other end, is
// no box of an array; small boxes begin at either side of seams, and none is cut. Tokens of a tile lie box by box.
#pragma once

#include <cstdint>

#include "cuda/common/device_axis.h"
#include "natten_jax/problem.h"

namespace natten_jax {

/// Most boxes of a tile: those of one token.
inline constexpr int kMostBoxes = 128;

/// How a tile is cut into boxes.
struct TileBoxes {
  bool go_around;            ///< Whether some dimension wraps; if not, a tile is one box.
  int count;                 ///< Boxes of a tile.
  int tokens;                ///< Tokens of a box.
  int extent[3];             ///< Extents of a box.
  uchar4 begin[kMostBoxes];  ///< Where each begins in the tile: x, y, z.
};

/// Where the `i`th token of a tile lies in it.
CUTLASS_HOST_DEVICE int3 place_in_boxes(const TileBoxes& boxes, int i) {
  const int box = i / boxes.tokens, in_box = i - box * boxes.tokens, line = in_box / boxes.extent[2];
  // Those past the tile have no place in it.
  const uchar4 begin = box < boxes.count ? boxes.begin[box] : make_uchar4(255, 0, 0, 0);
  return {begin.x + line / boxes.extent[1], begin.y + line % boxes.extent[1], begin.z + in_box % boxes.extent[2]};
}

/// Where tiles of a dimension begin, given the first token and the end of what they have to hold, so that no box is
/// cut.
CUTLASS_HOST_DEVICE int begin_at_seam(const DeviceAxis& axis, int box, int begin, int end) {
  if (axis.ends != Ends::kWrap) return begin;
  const int length = axis.kv_group_tokens;
  if (begin >= 0 && end <= length) return begin;
  // From the seam, forwards or backwards.
  const int distance = begin < 0 ? begin : begin - length;
  return begin - (distance >= 0 ? distance % box : (box - -distance % box) % box);
}

/// The boxes of tiles that some other ones walk over.
///
/// Args:
///   problem: whose dimensions may wrap.
///   tile: of these.
///   outer: of the tiles that walk.
TileBoxes boxes_of_tiles(const Problem& problem, const std::int64_t (&tile)[kRank], const std::int64_t (&outer)[kRank]);

}  // namespace natten_jax
