// Plan of a query tile in the forward kernel: the keys that the tile and its rows attend to.
#pragma once

#include "cuda/common/lane_plan.cuh"
#include "cuda/common/tile_walk.cuh"
#include "cuda/sm80/params.h"

namespace natten_jax::sm80 {

/// Plan of a query tile, in shared memory. Arrays of four hold x, y, z and an unused element.
struct alignas(16) TilePlan {
  int hull_begin[4], hull_end[4];    // bounding box of the local keys that any row attends to
  int inner_begin[4], inner_end[4];  // local keys that every row attends to
  const char* keys[2];               // [0] first key, [1] first additional key, of the batch entry and head
  const char* values[2];             // [0] first value, [1] first additional value, of the batch entry and head
  int tiles[4];                      // number of key/value tiles in the bounding box, per dimension
  int first_key;                     // first token of the dilation group
  int window_steps, steps;           // number of steps that read key/value tiles; number of all steps
  bool needs_mask;                   // true if steps of key/value tiles may need a mask
};

/// Loads four numbers with one instruction.
CUTE_DEVICE int4 quad(const int (&numbers)[4]) {
  return *reinterpret_cast<const int4*>(numbers);
}

/// Distance in tokens between neighboring keys of a dilation group, in each dimension.
CUTE_DEVICE int4 key_pitch(const ForwardParams& p) {
  const int line = p.axis[2].kv_local_extent, plane = line * p.axis[1].kv_local_extent;
  return make_int4(plane * p.axis[0].dilation, line * p.axis[1].dilation, p.axis[2].dilation, 0);
}

/// Computes the plan of a query tile, for steps of `kColumns` keys. Warp-collective. `own` is the plan of the dimension
/// that the lane plans.
template <class Element, int kColumns, bool kIsPlain>
CUTE_DEVICE void share_plan(const ForwardParams& p, const QueryAxisPlan& own, int batch, int head, TilePlan& plan) {
  const int lane = threadIdx.x % 32, d = planned_dimension();
  // Lanes 0 to 5 each compute one dimension of the window of the first or last row: lane = 3 * is_last + dimension.
  const int dimension = min(lane, 5) % 3;
  const bool is_last = lane >= 3;
  const int2 window = broadcast_lane(own, dimension)
                          .visible_keys(p.axis[dimension], is_last ? p.axis[dimension].q_tile - 1 : 0, kIsPlain);
  if (lane < 6) {
    (is_last ? plan.inner_begin : plan.hull_begin)[dimension] = window.x;
    (is_last ? plan.hull_end : plan.inner_end)[dimension] = window.y;
  }
  const int hull_begin = broadcast_lane(window.x, d), hull_end = broadcast_lane(window.y, 3 + d);
  const int inner_begin = broadcast_lane(window.x, 3 + d), inner_end = broadcast_lane(window.y, d);
  const bool is_whole =
      hull_begin == inner_begin && hull_end == inner_end && p.axis[d].by_kv_tile.rem(hull_end - hull_begin) == 0;
  const bool needs_mask = !__all_sync(0xffffffffu, is_whole) || p.kv_tile_tokens % kColumns != 0;
  const int tiles = p.axis[d].by_kv_tile.divide(max(hull_end - hull_begin, 0) + p.axis[d].kv_tile - 1);
  const int all_tiles = broadcast_lane(tiles, 0) * broadcast_lane(tiles, 1) * broadcast_lane(tiles, 2);
  if (lane < 3) plan.tiles[lane] = tiles;
  const int residue[3] = {broadcast_lane(own.kv.residue, 0), broadcast_lane(own.kv.residue, 1),
                          broadcast_lane(own.kv.residue, 2)};
  if (lane != 0) return;
  plan.needs_mask = needs_mask;
  plan.window_steps = all_tiles * ((p.kv_tile_tokens + kColumns - 1) / kColumns);
  plan.steps = plan.window_steps + (p.additional_kv + kColumns - 1) / kColumns;
  plan.first_key = (residue[0] * p.axis[1].kv_local_extent + residue[1]) * p.axis[2].kv_local_extent + residue[2];
  const int kv_head = p.by_heads_per_kv.divide(head);
  const auto head_address = [&](const void* data, std::int64_t tokens, int head_dim) {
    return static_cast<const char*>(data) +
           (batch * tokens * p.heads_kv + kv_head) * head_dim * static_cast<std::int64_t>(sizeof(Element));
  };
  plan.keys[0] = head_address(p.key, p.keys, p.head_dim);
  plan.keys[1] = head_address(p.additional_keys, p.additional_kv, p.head_dim);
  plan.values[0] = head_address(p.value, p.keys, p.head_dim_v);
  plan.values[1] = head_address(p.additional_values, p.additional_kv, p.head_dim_v);
}

/// Keys that a warp's rows attend to.
struct VisibleBox {
  alignas(16) int hull_begin[4], hull_end[4];  // bounding box of the local keys that any row attends to: x, y, z
  int inner_begin[4], inner_end[4];            // local keys that every row attends to

  /// False if no row attends to a key of the tile whose first key is `at`.
  CUTE_DEVICE bool overlaps(const ForwardParams& p, int4 at) const {
    return !KvWalk(at).is_outside(p.axis, quad(hull_begin), quad(hull_end));
  }

  /// True if every row attends to all keys of the tile whose first key is `at`.
  CUTE_DEVICE bool contains(const ForwardParams& p, int4 at) const {
    return KvWalk(at).is_inside(p.axis, quad(inner_begin), quad(inner_end));
  }
};

/// Computes the window of a row of the query tile. Warp-collective, with a row per lane.
///
/// Sets `begin` to the first key that the row attends to (x, y, z) and the row's token (-1 without a query), `end` to
/// the end of these keys, and `box` to the keys that the warp's rows attend to. Rows past the query tile get row 0's
/// window.
template <bool kIsPlain>
CUTE_DEVICE void plan_row(const ForwardParams& p, const QueryAxisPlan& own, int row, int (&begin)[4], int (&end)[4],
                          VisibleBox& box) {
  constexpr unsigned kAll = 0xffffffffu;
  constexpr int kMost = 0x7fffffff;
  const bool exists = row < p.q_tile_tokens;
  const int3 at = position_in_tile<&DeviceAxis::by_q_tile>(p.axis, exists ? row : 0);
  int token = 0;
  bool is_inside = exists;
#pragma unroll 1
  for (int d = 0; d < 3; ++d) {
    const DeviceAxis& axis = p.axis[d];
    const QueryAxisPlan plan = broadcast_lane(own, d);
    const int coordinate = d == 0 ? at.x : d == 1 ? at.y : at.z, index = plan.q_begin + coordinate;
    const int2 window = plan.visible_keys(axis, coordinate, kIsPlain);
    begin[d] = window.x;
    end[d] = window.y;
    box.hull_begin[d] = __reduce_min_sync(kAll, exists ? window.x : kMost);
    box.hull_end[d] = __reduce_max_sync(kAll, exists ? window.y : -kMost);
    box.inner_begin[d] = __reduce_max_sync(kAll, exists ? window.x : -kMost);
    box.inner_end[d] = __reduce_min_sync(kAll, exists ? window.y : kMost);
    is_inside = is_inside && index < plan.query.local_length;
    token = token * axis.query_local_extent + index * axis.dilation + plan.query.residue;
  }
  begin[3] = is_inside ? token : -1;
}

}  // namespace natten_jax::sm80
