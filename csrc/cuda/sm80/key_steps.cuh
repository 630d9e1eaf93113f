// Steps of the forward kernel: the order in which it reads the keys of a query tile.
#pragma once

#include "cuda/common/tile_walk.cuh"
#include "cuda/sm80/params.h"
#include "cuda/sm80/tile_plan.cuh"

namespace natten_jax::sm80 {

/// Steps of a query tile. A step reads several columns (keys) of a key/value tile, or several additional keys.
///
/// `fill` computes `kThreads` steps at a time. The previous `kThreads` steps stay valid, because they are still in use.
template <int kThreads>
struct KeySteps {
  static constexpr int kCapacity = 2 * kThreads;
  static constexpr int kWindow = 1;   // flag: the step reads a key/value tile, not additional keys
  static constexpr int kInside = 2;   // flag: all keys of the step exist
  static constexpr int kWhole = 4;    // flag: every row attends to all keys of the step
  alignas(16) int4 tiles[kCapacity];  // x, y, z: first key of the tile; w: token of this key, or first additional key
  int packed_columns[kCapacity];      // bits 0 to 2: flags; higher bits: first column of the step in its tile

  /// Computes the `kThreads` steps from `first` on. All threads of the CTA must call it.
  CUTE_DEVICE void fill(const ForwardParams& p, const TilePlan& plan, int columns, int first) {
    const int i = first + static_cast<int>(threadIdx.x);
    if (i >= plan.steps) return;
    int4 at = make_int4(0, 0, 0, 0);
    int packed_column = 0;
    if (i < plan.window_steps) {
      const int per_tile = (p.kv_tile_tokens + columns - 1) / columns;
      const int tile = i / per_tile, column = (i - tile * per_tile) * columns;
      const KvWalk walk(p.axis, plan.hull_begin, plan.tiles, tile);
      at = make_int4(walk.x, walk.y, walk.z, 0);
      const int4 pitch = key_pitch(p);
      at.w = at.x * pitch.x + at.y * pitch.y + at.z * pitch.z + plan.first_key;
      const bool is_full = column + columns <= p.kv_tile_tokens;
      if (is_full && walk.is_inside(p.axis, quad(plan.hull_begin), quad(plan.hull_end))) packed_column |= kInside;
      if (is_full && walk.is_inside(p.axis, quad(plan.inner_begin), quad(plan.inner_end))) packed_column |= kWhole;
      packed_column |= kWindow | column << 3;
    } else {
      at.w = (i - plan.window_steps) * columns;
      if (at.w + columns <= p.additional_kv) packed_column |= kInside | kWhole;
    }
    tiles[i % kCapacity] = at;
    packed_columns[i % kCapacity] = packed_column;
  }
};

}  // namespace natten_jax::sm80
