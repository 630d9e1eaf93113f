// Plan of a query tile of the Hopper forward kernel. It contains the parameters of the tile's loads and products, and
// is computed before they start.
#pragma once

#include <cute/config.hpp>

#include "cuda/common/lane_plan.cuh"
#include "cuda/sm90/params.h"
#include "natten_jax/logsumexp.h"

namespace natten_jax::sm90 {

constexpr int kMostRows = 64 * kMostWarpgroups;  // maximum number of rows of a query tile

/// Plan of a query tile. Arrays of four contain x, y, z and an unused element.
struct alignas(16) TilePlan {
  // Bounding box of the local keys to which at least one row attends. In dimensions that wrap, `hull_begin` may be
  // smaller than the begin of this box (`begin_at_seam`).
  int hull_begin[4], hull_end[4];
  // Per warpgroup: `visible` is the box of local keys to which at least one of its rows attends, and `inner` is the box
  // of local keys to which all of its rows attend.
  int visible_begin[kMostWarpgroups][4], visible_end[kMostWarpgroups][4];
  int inner_begin[kMostWarpgroups][4], inner_end[kMostWarpgroups][4];
  int q_begin[4];        // Index of the tile's first query in the dilation group.
  int query_residue[4];  // Local coordinates of the dilation group's first query.
  int batch, head;
  // Number of key/value tiles. It is at least 1, even if all keys are masked out. If it is negative, the plan marks the
  // end of the query tiles.
  int kv_tiles;
  int query_map, kv_map;  // Classes of the dilation group, which are the indices of its tensor maps.
  // Offsets in arrays, in heads:
  // - `query_slot`: of the dilation group's first query, at query head `head`.
  // - `kv_slot`: of the dilation group's first key, at the matching key/value head.
  // - `additional_slot`: of the first additional key, at that key/value head.
  int query_slot, kv_slot;
  int additional_slot;
  float exponent_scale;  // Scale of the head's logits, times log2(e).
  // For each coordinate in the query tile: the first key to which queries with this coordinate attend, and the end of
  // these keys. All x coordinates come first, then all y coordinates, then all z coordinates.
  int2 windows[kMostRows + 2];
};

/// True if the launch continues earlier ones. This is never the case in kernels for plain problems.
template <class Traits>
CUTE_DEVICE bool continues(const ForwardParams& p) {
  return !Traits::kIsPlain && p.continues;
}

/// Class of a dilation group. Each lane passes the group's length in the dimension that it plans, and the length of a
/// group without remainder token. Warp-collective.
CUTE_DEVICE int group_class(int local_length, int tokens_without_remainder) {
  const unsigned is_longer = __ballot_sync(0xffffffffu, local_length > tokens_without_remainder);
  return static_cast<int>((is_longer & 1) << 2 | (is_longer & 2) | (is_longer >> 2 & 1));
}

/// Dilation group of a query tile: its tensor maps and first tokens, for queries and for keys and values. The
/// constructor is warp-collective: each lane passes the dimension that it plans.
struct PlannedGroup {
  int query_map, kv_map;  // Classes of the group, which are the indices of its tensor maps.
  int q_token, kv_token;  // First query and first key of the group, relative to the batch entry.

  CUTE_DEVICE PlannedGroup(const DeviceAxis (&axis)[3], const EntryAxis& entry, const GroupTokens& query,
                           const GroupTokens& kv)
      : query_map(group_class(query.local_length, entry.query_group_tokens)),
        kv_map(group_class(kv.local_length, entry.kv_group_tokens)),
        q_token(token_number(query.residue, axis[1].query_local_extent, axis[2].query_local_extent)),
        kv_token(token_number(kv.residue, axis[1].kv_local_extent, axis[2].kv_local_extent)) {}
};

/// Computes a plan, except `windows`. Warp-collective. `kIsPlain`: see ForwardTraits.
template <bool kIsPlain>
CUTE_DEVICE void plan_tile(const ForwardParams& p, const EntryAxis& entry, const QueryAxisPlan& own,
                           const TilePosition& position, TilePlan& plan) {
  const int lane = threadIdx.x % 32, batch = position.batch, head = position.head;
  // Each lane computes the window of one corner of a warpgroup's bounding box, in one dimension: lane = 6 * warpgroup +
  // 3 * is_last + dimension.
  const int corner = min(lane, kCorners - 1), dimension = corner % 3;
  const int2 window = broadcast_lane(own, dimension).visible_keys(p.axis[dimension], p.corner[corner], kIsPlain);
  if (lane < kCorners) {
    const bool is_last = corner / 3 % 2 == 1;
    (is_last ? plan.inner_begin : plan.visible_begin)[corner / 6][dimension] = window.x;
    (is_last ? plan.visible_end : plan.inner_end)[corner / 6][dimension] = window.y;
  }
  const int d = planned_dimension();
  const DeviceAxis& axis = p.axis[d];
  const int first_visible = broadcast_lane(window.x, d), hull_end = broadcast_lane(window.y, kCorners - 3 + d);
  const int hull_begin = kIsPlain ? first_visible : begin_at_seam(axis, p.kv_boxes.extent[d], first_visible, hull_end);
  const int kv_tiles = axis.by_kv_tile.divide(max(hull_end - hull_begin, 0) + axis.kv_tile - 1);
  const int all_kv_tiles = broadcast_lane(kv_tiles, 0) * broadcast_lane(kv_tiles, 1) * broadcast_lane(kv_tiles, 2);
  const PlannedGroup group(p.axis, entry, own.query, own.kv);
  if (lane < 3) {
    // A query tile that attends to no keys loads one key tile past the end of the layout, which TMA fills with zeros.
    // It must not load the first key of its dilation group. The group may be empty on this device, and the address of
    // that key would then belong to another head or batch entry.
    plan.hull_begin[lane] = all_kv_tiles == 0 ? axis.kv_local_extent : hull_begin;
    plan.hull_end[lane] = hull_end;
    plan.q_begin[lane] = own.q_begin;
    plan.query_residue[lane] = own.query.residue;
  }
  if (lane == 0) {
    const int kv_head = p.by_heads_per_kv.divide(head);
    plan.batch = batch;
    plan.head = head;
    plan.exponent_scale = p.scale.for_head(batch * p.heads + head).logits * kLog2E;
    plan.kv_tiles = max(all_kv_tiles, 1);
    plan.query_map = group.query_map;
    plan.kv_map = group.kv_map;
    // The strides of the tensor maps include the dilation. The offset selects the group's first token.
    plan.query_slot = (batch * p.queries + group.q_token) * p.heads + head;
    plan.kv_slot = (batch * p.keys + group.kv_token) * p.heads_kv + kv_head;
    plan.additional_slot = batch * p.additional_kv * p.heads_kv + kv_head;
  }
}

/// Computes `windows` of a plan. Warp-collective.
template <bool kIsPlain>
CUTE_DEVICE void plan_windows(const ForwardParams& p, const QueryAxisPlan& own, TilePlan& plan) {
  const int y_first = p.axis[0].q_tile, z_first = y_first + p.axis[1].q_tile, end = z_first + p.axis[2].q_tile;
  for (int first = 0; first < end; first += 32) {
    const int i = min(first + static_cast<int>(threadIdx.x % 32), end - 1), d = (i >= y_first) + (i >= z_first);
    plan.windows[i] = broadcast_lane(own, d).visible_keys(p.axis[d],
                                                          i - (d == 0   ? 0
                                                               : d == 1 ? y_first
                                                                        : z_first),
                                                          kIsPlain);
  }
}

}  // namespace natten_jax::sm90
