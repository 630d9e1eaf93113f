// Plan of a query tile of the forward kernel.
#pragma once

#include "cuda/common/lane_plan.cuh"
#include "cuda/common/tile_walk.cuh"
#include "cuda/sm80/params.h"

namespace natten_jax::sm80 {

/// Arrays of four hold x, y, z and another number. All threads share them.
struct alignas(16) TilePlan {
  int hull_begin[4], hull_end[4];    // bounding box of the local keys that any row sees
  int inner_begin[4], inner_end[4];  // local keys that every row sees
  const char* keys[2];               // addresses for the batch entry and head: keys, additional keys
  const char* values[2];
  int tiles[4];             // key/value tiles per dimension
  int first_key;            // the dilation group's first token
  int window_steps, steps;  // steps in which keys are read: within windows, in total
  bool needs_mask;          // some row does not see all of some tile
};

/// Loads four numbers at once.
CUTE_DEVICE int4 quad(const int (&numbers)[4]) {
  return *reinterpret_cast<const int4*>(numbers);
}

/// Distance in tokens between neighboring keys of a dilation group.
CUTE_DEVICE int4 key_pitch(const ForwardParams& p) {
  const int line = p.axis[2].kv_local_extent, plane = line * p.axis[1].kv_local_extent;
  return make_int4(plane * p.axis[0].dilation, line * p.axis[1].dilation, p.axis[2].dilation, 0);
}

/// Fills in a plan. Warp-collective; each lane passes its dimension as `own`. Tiles are read in steps of `kColumns`
/// keys.
template <class Element, int kColumns, bool kIsPlain>
CUTE_DEVICE void share_plan(const ForwardParams& p, const QueryAxisPlan& own, int batch, int head, TilePlan& plan) {
  const int lane = threadIdx.x % 32, d = planned_dimension();
  // Each lane computes a window of the first or the last row: lane = 3 * is_last + dimension.
  const int of = min(lane, 5) % 3;
  const bool is_last = lane >= 3;
  const int2 window = of_lane(own, of).seen(p.axis[of], is_last ? p.axis[of].q_tile - 1 : 0, kIsPlain);
  if (lane < 6) {
    (is_last ? plan.inner_begin : plan.hull_begin)[of] = window.x;
    (is_last ? plan.hull_end : plan.inner_end)[of] = window.y;
  }
  const int hull_begin = of_lane(window.x, d), hull_end = of_lane(window.y, 3 + d);
  const int inner_begin = of_lane(window.x, 3 + d), inner_end = of_lane(window.y, d);
  const bool is_whole =
      hull_begin == inner_begin && hull_end == inner_end && p.axis[d].by_kv_tile.rem(hull_end - hull_begin) == 0;
  const bool needs_mask = !__all_sync(0xffffffffu, is_whole) || p.kv_tile_tokens % kColumns != 0;
  const int tiles = p.axis[d].by_kv_tile.divide(max(hull_end - hull_begin, 0) + p.axis[d].kv_tile - 1);
  const int all_tiles = of_lane(tiles, 0) * of_lane(tiles, 1) * of_lane(tiles, 2);
  if (lane < 3) plan.tiles[lane] = tiles;
  const int residue[3] = {of_lane(own.kv.residue, 0), of_lane(own.kv.residue, 1), of_lane(own.kv.residue, 2)};
  if (lane != 0) return;
  plan.needs_mask = needs_mask;
  plan.window_steps = all_tiles * ((p.kv_tile_tokens + kColumns - 1) / kColumns);
  plan.steps = plan.window_steps + (p.additional_kv + kColumns - 1) / kColumns;
  plan.first_key = (residue[0] * p.axis[1].kv_local_extent + residue[1]) * p.axis[2].kv_local_extent + residue[2];
  const int kv_head = p.by_heads_per_kv.divide(head);
  const auto of_head = [&](const void* data, std::int64_t tokens, int head_dim) {
    return static_cast<const char*>(data) +
           (batch * tokens * p.heads_kv + kv_head) * head_dim * static_cast<std::int64_t>(sizeof(Element));
  };
  plan.keys[0] = of_head(p.key, p.keys, p.head_dim);
  plan.keys[1] = of_head(p.additional_keys, p.additional_kv, p.head_dim);
  plan.values[0] = of_head(p.value, p.keys, p.head_dim_v);
  plan.values[1] = of_head(p.additional_values, p.additional_kv, p.head_dim_v);
}

/// Keys that a warp's rows see.
struct SeenBox {
  alignas(16) int hull_begin[4], hull_end[4];  // local keys that any row sees: x, y, z
  int inner_begin[4], inner_end[4];            // local keys that every row sees

  /// True if some row sees keys of the key/value tile at `at`.
  CUTE_DEVICE bool overlaps(const ForwardParams& p, int4 at) const {
    return !KvWalk(at).is_outside(p.axis, quad(hull_begin), quad(hull_end));
  }

  /// True if every row sees all keys of the tile.
  CUTE_DEVICE bool contains(const ForwardParams& p, int4 at) const {
    return KvWalk(at).is_inside(p.axis, quad(inner_begin), quad(inner_end));
  }
};

/// Fills in a row's window: first key seen (x, y, z) and the row's token, or -1; end of the keys seen. Warp-collective;
/// `box` is set to the keys that the warp's rows see. Rows past the query tile get the position of row 0.
template <bool kIsPlain>
CUTE_DEVICE void plan_row(const ForwardParams& p, const QueryAxisPlan& own, int row, int (&begin)[4], int (&end)[4],
                          SeenBox& box) {
  constexpr unsigned kAll = 0xffffffffu;
  constexpr int kMost = 0x7fffffff;
  const bool exists = row < p.q_tile_tokens;
  const int3 at = place_in_tile<&DeviceAxis::by_q_tile>(p.axis, exists ? row : 0);
  int token = 0;
  bool is_inside = exists;
#pragma unroll 1
  for (int d = 0; d < 3; ++d) {
    const DeviceAxis& axis = p.axis[d];
    const QueryAxisPlan plan = of_lane(own, d);
    const int coordinate = d == 0 ? at.x : d == 1 ? at.y : at.z, index = plan.q_begin + coordinate;
    const int2 seen = plan.seen(axis, coordinate, kIsPlain);
    begin[d] = seen.x;
    end[d] = seen.y;
    box.hull_begin[d] = __reduce_min_sync(kAll, exists ? seen.x : kMost);
    box.hull_end[d] = __reduce_max_sync(kAll, exists ? seen.y : -kMost);
    box.inner_begin[d] = __reduce_max_sync(kAll, exists ? seen.x : -kMost);
    box.inner_end[d] = __reduce_min_sync(kAll, exists ? seen.y : kMost);
    is_inside = is_inside && index < plan.query.local_length;
    token = token * axis.query_local_extent + index * axis.dilation + plan.query.residue;
  }
  begin[3] = is_inside ? token : -1;
}

}  // namespace natten_jax::sm80
