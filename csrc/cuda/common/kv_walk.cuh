// The order in which a query tile reads key/value tiles.
#pragma once

#include <cute/config.hpp>

#include "cuda/common/axis.h"

namespace natten_jax {

/// Walks the key/value tiles of a query tile, last dimension fastest, without divisions.
struct KvWalk {
  int x, y, z;

  CUTE_DEVICE explicit KvWalk(int4 begin) : x(begin.x), y(begin.y), z(begin.z) {}

  CUTE_DEVICE void next(const Axis (&axis)[3], int4 begin, int4 end) {
    z += axis[2].kv_tile;
    if (z >= end.z) {
      z = begin.z;
      y += axis[1].kv_tile;
      if (y >= end.y) {
        y = begin.y;
        x += axis[0].kv_tile;
      }
    }
  }

  /// Whether the tile here lies between `begin` and `end` whole.
  CUTE_DEVICE bool is_inside(const Axis (&axis)[3], int4 begin, int4 end) const {
    return x >= begin.x && y >= begin.y && z >= begin.z && x + axis[0].kv_tile <= end.x &&
           y + axis[1].kv_tile <= end.y && z + axis[2].kv_tile <= end.z;
  }
};

}  // namespace natten_jax
