// Tiles that are loaded and stored in boxes, because a wrapping dimension splits them at its end.
#pragma once

#include "cuda/common/tile_boxes.h"

namespace natten_jax::sm90 {

/// Calls `call(first_row, x, y, z)` for each box of a tile that begins at x, y, z. The arguments are the box's first
/// row in the tile and its first token in the tensor map, wrapped around if `goes_around`.
template <class Call>
CUTE_DEVICE void for_boxes(const TileBoxes& boxes, const DeviceAxis (&axis)[3], int x, int y, int z, bool goes_around,
                           const Call& call) {
  const auto place = [&](int d, int index) { return goes_around ? axis[d].around(index) : index; };
#pragma unroll 2
  for (int box = 0; box < boxes.count; ++box) {
    const uchar4 begin = boxes.begin[box];
    call(box * boxes.tokens, place(0, x + begin.x), place(1, y + begin.y), place(2, z + begin.z));
  }
}

}  // namespace natten_jax::sm90
