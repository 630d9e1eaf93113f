// Iteration over the tiles of a box of tokens.
#pragma once

#include <cute/config.hpp>

#include "cuda/common/device_axis.h"

namespace natten_jax {

/// Iterates over the tiles of a box, last dimension fastest. `next` uses no divisions. `kTile` is the member of
/// DeviceAxis with the tile's extent.
template <int DeviceAxis::* kTile>
struct TileWalk {
  int x, y, z;

  CUTE_DEVICE explicit TileWalk(int4 begin) : x(begin.x), y(begin.y), z(begin.z) {}

  /// Starts at the `i`th tile of a box with `tiles` tiles per dimension. Uses divisions.
  CUTE_DEVICE TileWalk(const DeviceAxis (&axis)[3], const int (&begin)[4], const int (&tiles)[4], int i) {
    const int line = i / tiles[2], in_x = line / tiles[1];
    x = begin[0] + in_x * axis[0].*kTile;
    y = begin[1] + (line - in_x * tiles[1]) * axis[1].*kTile;
    z = begin[2] + (i - line * tiles[2]) * axis[2].*kTile;
  }

  /// First token of the current tile.
  CUTE_DEVICE int4 begin() const { return make_int4(x, y, z, 0); }

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

  /// True if the current tile has no token in the box from `begin` to `end` (exclusive).
  CUTE_DEVICE bool is_outside(const DeviceAxis (&axis)[3], int4 begin, int4 end) const {
    return x >= end.x || y >= end.y || z >= end.z || x + axis[0].*kTile <= begin.x || y + axis[1].*kTile <= begin.y ||
           z + axis[2].*kTile <= begin.z;
  }

  /// True if all tokens of the current tile are in the box from `begin` to `end` (exclusive).
  CUTE_DEVICE bool is_inside(const DeviceAxis (&axis)[3], int4 begin, int4 end) const {
    return x >= begin.x && y >= begin.y && z >= begin.z && x + axis[0].*kTile <= end.x && y + axis[1].*kTile <= end.y &&
           z + axis[2].*kTile <= end.z;
  }
};

/// Iterates over the key/value tiles that a query tile attends to.
using KvWalk = TileWalk<&DeviceAxis::kv_tile>;
/// Iterates over the query tiles that attend to a key/value tile.
using QueryWalk = TileWalk<&DeviceAxis::q_tile>;

}  // namespace natten_jax
