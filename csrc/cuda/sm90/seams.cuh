// Division of a tile into boxes for TMA. If a dimension wraps, a tile can extend past the end of the dimension and
// continue at its beginning. TMA cannot copy such a tile as one box, so the tile is copied in smaller boxes
// (cuda/common/tile_boxes.h).
#pragma once

#include "cuda/common/tile_boxes.h"

namespace natten_jax::sm90 {

/// Calls `call(first_row, x, y, z)` for each box of the tile that begins at `x`, `y`, `z`. `first_row` is the index in
/// the tile of the box's first row. The other arguments are the coordinates of the box's first token in the tensor map.
/// If `wraps_indices`, coordinates outside of a dimension that wraps are wrapped around.
template <class Call>
CUTE_DEVICE void for_boxes(const TileBoxes& boxes, const DeviceAxis (&axis)[3], int x, int y, int z, bool wraps_indices,
                           const Call& call) {
  const auto wrapped = [&](int d, int index) { return wraps_indices ? axis[d].wrap_index(index) : index; };
#pragma unroll 2
  for (int box = 0; box < boxes.count; ++box) {
    const uchar4 begin = boxes.begin[box];
    call(box * boxes.tokens, wrapped(0, x + begin.x), wrapped(1, y + begin.y), wrapped(2, z + begin.z));
  }
}

}  // namespace natten_jax::sm90
