// The order in which the tiles of a box of tokens are read.
#pragma once

#include <cute/config.hpp>

#include "cuda/common/device_axis.h"

namespace natten_jax {

/// Walks over tiles of extents `kTile`, last dimension fastest, without divisions.
template <int DeviceAxis::* kTile>
struct TileWalk {
  int x, y, z;

  CUTE_DEVICE explicit TileWalk(int4 begin) : x(begin.x), y(begin.y), z(begin.z) {}

  CUTE_DEVICE void next(const DeviceAxis (&axis)[3], int4 begin, int4 end) {
    z += axis[2].*kTile;
    if (z >= end.z) {
      z = begin.z;
      y += axis[1].*kTile;
      if (y >= end.y) {
        y = begin.y;
        x += axis[0].*kTile;
      }
    }
  }

  /// Whether the tile here holds nothing between `begin` and `end`.
  CUTE_DEVICE bool is_outside(const DeviceAxis (&axis)[3], int4 begin, int4 end) const {
    return x >= end.x || y >= end.y || z >= end.z || x + axis[0].*kTile <= begin.x || y + axis[1].*kTile <= begin.y ||
           z + axis[2].*kTile <= begin.z;
  }

  /// Whether the tile here lies between `begin` and `end` whole.
  CUTE_DEVICE bool is_inside(const DeviceAxis (&axis)[3], int4 begin, int4 end) const {
    return x >= begin.x && y >= begin.y && z >= begin.z && x + axis[0].*kTile <= end.x && y + axis[1].*kTile <= end.y &&
           z + axis[2].*kTile <= end.z;
  }
};

/// The key/value tiles of a query tile.
using KvWalk = TileWalk<&DeviceAxis::kv_tile>;
/// The query tiles of a key/value tile.
using QueryWalk = TileWalk<&DeviceAxis::q_tile>;

}  // namespace natten_jax
