// Plan of a key/value tile of the Hopper backward kernel. It contains the parameters of the tile's loads and products,
// and is computed before they start.
#pragma once

#include "cuda/common/tile_walk.cuh"
#include "cuda/sm90/params.h"
#include "cuda/sm90/tile_plan.cuh"
#include "cuda/tma/entry_maps.cuh"

namespace natten_jax::sm90 {

using BackwardMaps = MapsOfEntries<kBackwardArrays, kGroupClasses>;

template <int kKeys>
struct KeyTilePlan {
  // Bounding box of the local queries that attend to any key of the tile: x, y, z. If key/value tiles take turns in
  // adding to dQ, hull_begin is rounded down to the start of a query tile. If they do not, `begin_at_seam` adjusts
  // hull_begin in dimensions that wrap.
  int4 hull_begin, hull_end;
  int4 inner_begin, inner_end;  // local queries that attend to every key of the tile: x, y, z
  int4 kv_begin;                // index of the tile's first key in the dilation group: x, y, z
  int4 q_stride;                // tokens from one query of the dilation group to the next, per dimension
  KeyAxisPlan axis[3];          // unset for additional tokens
  int batch, kv_head, group;
  float scale;  // scale of the logits
  int q_tiles;  // number of query tiles per query head; negative: the plan marks the end of the key/value tiles
  bool is_additional;
  int query_map, kv_map;  // indices of the tensor maps: classes of the dilation group
  // Tensor maps of Q and dO. Looking them up for each query tile took 2 to 3% of a pass with heads of 64 (H100).
  const CUtensorMap *queries, *out_cotangents;
  int q_token;  // first query of the dilation group, relative to the batch entry
  // Offsets in arrays, in heads: of the dilation group's first query at head 0, and of its first key at head kv_head.
  int query_slot, kv_slot;
  int2 windows[kKeys + 2];     // per coordinate in the tile: first query that attends to it, and end of the queries
  int4 row_windows[kKeys][2];  // per key: first query that attends to it (x, y, z), and end of the queries (x, y, z)
};

/// Plans a tile of additional tokens, to which every query attends.
template <int kKeys>
CUTE_DEVICE void plan_additional(const BackwardParams& p, int tile, KeyTilePlan<kKeys>& plan) {
  const TilePosition position = p.schedule.locate_additional(tile);
  const int lane = threadIdx.x % 32, first = position.index[2] * p.kv_tile_tokens;
  const int4 begin = make_int4(0, 0, 0, 0);
  const int4 end =
      make_int4(p.axis[0].query_local_extent, p.axis[1].query_local_extent, p.axis[2].query_local_extent, 0);
  for (int row = lane; row < kKeys; row += 32) {
    plan.row_windows[row][0] = begin;
    plan.row_windows[row][1] = row < p.kv_tile_tokens && first + row < p.additional_kv ? end : begin;
  }
  if (lane == 0) {
    plan.hull_begin = plan.inner_begin = begin;
    plan.hull_end = end;
    plan.inner_end = first + p.kv_tile_tokens <= p.additional_kv ? end : begin;
    plan.kv_begin = make_int4(0, 0, first, 0);
    plan.q_stride = make_int4(end.y * end.z, end.z, 1, 0);
    plan.batch = position.batch;
    plan.kv_head = position.head;
    plan.scale = p.scale.for_head((position.batch * p.heads_kv + position.head) * p.heads_per_kv).logits;
    plan.group = 0;
    plan.q_tiles = p.axis[0].by_q_tile.divide(end.x + p.axis[0].q_tile - 1) *
                   p.axis[1].by_q_tile.divide(end.y + p.axis[1].q_tile - 1) *
                   p.axis[2].by_q_tile.divide(end.z + p.axis[2].q_tile - 1);
    plan.is_additional = true;
    plan.query_map = kWholeLayout;
    plan.queries = &p.query[kWholeLayout];
    plan.out_cotangents = &p.out_cotangent[kWholeLayout];
    plan.kv_map = 0;
    plan.q_token = 0;
    plan.query_slot = position.batch * p.queries * p.heads;
    plan.kv_slot = position.batch * p.additional_kv * p.heads_kv + position.head;
  }
}

/// Computes the plan of a tile, except `windows` and `row_windows` of tiles of the layout (`plan_windows` does).
/// Returns false if the tile lies past the end of its dilation group. Warp-collective.
///
/// Args:
///   p: parameters of the launch.
///   origins: origins of the query tokens in three dimensions, then origins of the key/value tokens.
///   layout: cache of the layout of the tile's batch entry. Used only if batch entries have separate layouts.
///   tile: number of the tile.
///   plan: the result.
///
/// `kIsPlain`: see ForwardTraits.
template <bool kIsPlain, int kKeys>
CUTE_DEVICE bool plan_key_tile(const BackwardParams& p, const Origin* origins, EntryLayout::Cache& layout, int tile,
                               KeyTilePlan<kKeys>& plan) {
  if (tile < p.schedule.additional_tiles) {
    plan_additional(p, tile, plan);
    return true;
  }
  const TilePosition position = p.schedule.locate(p.axis, tile);
  const int lane = threadIdx.x % 32, d = planned_dimension();
  const DeviceAxis& axis = p.axis[d];
  const int number = d == 0 ? position.index[0] : d == 1 ? position.index[1] : position.index[2];
  const Origin query_origin = kIsPlain ? Origin{0, 0} : origins[d],
               kv_origin = kIsPlain ? Origin{0, 0} : origins[3 + d];
  const int index = p.schedule.tile_of(axis, d, number, kv_origin.index - query_origin.index);
  const int residue = d == 0 ? position.residue[0] : d == 1 ? position.residue[1] : position.residue[2];
  EntryAxis entry(axis, query_origin, kv_origin);
  if (!kIsPlain && p.layouts != nullptr) entry = EntryAxis(axis, EntryLayout(p.layouts, position.batch, layout), d);
  const KeyAxisPlan own(axis, entry, residue, index);
  if (__any_sync(0xffffffffu, own.kv_begin >= own.kv.local_length)) return false;
  const int2 first_window = own.attending_queries(axis, own.first, kIsPlain),
             last_window = own.attending_queries(axis, own.last, kIsPlain);
  // Additions are counted per query tile. So all key/value tiles must divide the queries into the same query tiles,
  // which start at multiples of q_tile.
  const int hull_begin = p.schedule.additions != nullptr ? axis.by_q_tile.divide(first_window.x) * axis.q_tile
                         : kIsPlain ? first_window.x
                                    : begin_at_seam(axis, p.q_boxes.extent[d], first_window.x, last_window.y);
  const int q_tiles =
      first_window.x < last_window.y ? axis.by_q_tile.divide(last_window.y - hull_begin + axis.q_tile - 1) : 0;
  const int all_q_tiles = broadcast_lane(q_tiles, 0) * broadcast_lane(q_tiles, 1) * broadcast_lane(q_tiles, 2);
  const PlannedGroup group(p.axis, entry, own.query, own.kv);
  if (lane < 3) {
    const auto set = [&](int4& field, int value) { reinterpret_cast<int*>(&field)[lane] = value; };
    set(plan.hull_begin, hull_begin);
    set(plan.hull_end, last_window.y);
    set(plan.inner_begin, last_window.x);
    set(plan.inner_end, own.is_whole(axis) ? first_window.y : last_window.x);
    set(plan.kv_begin, own.kv_begin);
    const int z_extent = p.axis[2].query_local_extent, line = p.axis[1].query_local_extent * z_extent;
    set(plan.q_stride, axis.dilation * (lane == 0 ? line : lane == 1 ? z_extent : 1));
    plan.axis[lane] = own;
  }
  if (lane == 0) {
    plan.batch = position.batch;
    plan.kv_head = position.head;
    plan.scale = p.scale.for_head((position.batch * p.heads_kv + position.head) * p.heads_per_kv).logits;
    plan.group = position.group;
    plan.q_tiles = all_q_tiles;
    plan.is_additional = false;
    plan.query_map = group.query_map;
    const CUtensorMap* const entry_maps = kIsPlain ? nullptr : p.entry_maps;
    plan.queries = BackwardMaps::select_map(entry_maps, p.query, kQueriesOfEntry, position.batch, group.query_map);
    plan.out_cotangents =
        BackwardMaps::select_map(entry_maps, p.out_cotangent, kOutCotangentsOfEntry, position.batch, group.query_map);
    plan.kv_map = group.kv_map;
    // The strides of the tensor maps include the dilation. The offset selects the group's first token.
    plan.q_token = group.q_token;
    plan.query_slot = (position.batch * p.queries + group.q_token) * p.heads;
    plan.kv_slot = (position.batch * p.keys + group.kv_token) * p.heads_kv + position.head;
  }
  return true;
}

/// Computes `windows` and `row_windows` of a plan. Warp-collective.
///
/// Args:
///   p: parameters of the launch.
///   row_coordinates: coordinates x, y, z of each row in the key/value tile.
///   plan: plan of a tile of the layout.
template <bool kIsPlain, int kKeys>
CUTE_DEVICE void plan_windows(const BackwardParams& p, const uchar4* row_coordinates, KeyTilePlan<kKeys>& plan) {
  const int lane = threadIdx.x % 32;
  const int y_first = p.axis[0].kv_tile, z_first = y_first + p.axis[1].kv_tile, end = z_first + p.axis[2].kv_tile;
  for (int first = 0; first < end; first += 32) {
    const int i = min(first + lane, end - 1), dimension = (i >= y_first) + (i >= z_first);
    const KeyAxisPlan& axis_plan = plan.axis[dimension];
    const int coordinate = i - (dimension == 0 ? 0 : dimension == 1 ? y_first : z_first);
    plan.windows[i] = axis_plan.attending_queries(p.axis[dimension], axis_plan.kv_begin + coordinate, kIsPlain);
  }
  __syncwarp();
  for (int row = lane; row < kKeys; row += 32) {
    const uchar4 in_tile = row_coordinates[row];
    const int2 x = plan.windows[in_tile.x], y = plan.windows[y_first + in_tile.y],
               z = plan.windows[z_first + in_tile.z];
    const bool is_inside = row < p.kv_tile_tokens;
    plan.row_windows[row][0] = make_int4(x.x, y.x, z.x, 0);
    plan.row_windows[row][1] = is_inside ? make_int4(x.y, y.y, z.y, 0) : make_int4(0, 0, 0, 0);
  }
}

/// Token of a row of a query tile, relative to the batch entry; -1 if the row lies past `hull_end` of the plan.
///
/// Args:
///   p: parameters of the launch.
///   plan: plan of the key/value tile.
///   at: first query of the query tile.
///   in_tile: coordinates of the row in the query tile.
template <bool kIsPlain, int kKeys>
CUTE_DEVICE int query_token(const BackwardParams& p, const KeyTilePlan<kKeys>& plan, int4 at, uchar4 in_tile) {
  int x = at.x + in_tile.x, y = at.y + in_tile.y, z = at.z + in_tile.z;
  // Compares indices in the dilation group, because token numbers past the layout might exceed 32 bits.
  if (x >= plan.hull_end.x || y >= plan.hull_end.y || z >= plan.hull_end.z) return -1;
  if (!kIsPlain && p.q_boxes.has_seams && !plan.is_additional) {
    x = p.axis[0].wrap_index(x);
    y = p.axis[1].wrap_index(y);
    z = p.axis[2].wrap_index(z);
  }
  return plan.q_token + x * plan.q_stride.x + y * plan.q_stride.y + z * plan.q_stride.z;
}

/// Position of a key/value tile in the fixed order in which key/value tiles add to the dQ of a query tile.
struct OrderedAddition {
  int q_tile;  // number of the query tile in its dilation group
  int before;  // number of key/value tiles that add before this one
};

/// Computes the position of a key/value tile in this order, for the query tile at `at`. Warp-collective.
///
/// The key/value tiles to which the query tile attends form a box. All tiles of the box add to the dQ of the query
/// tile, in the order of KeyTileSchedule. `before` is computed from two numbers per dimension: the extent of the box in
/// tiles, and the number of tiles in this extent that come before the key/value tile.
template <int kKeys>
CUTE_DEVICE OrderedAddition plan_addition(const BackwardParams& p, const KeyTilePlan<kKeys>& plan,
                                          const QueryWalk& at) {
  const int d = planned_dimension();
  const DeviceAxis& axis = p.axis[d];
  const int q_begin = d == 0 ? at.x : d == 1 ? at.y : at.z;
  const int q_tile = axis.by_q_tile.divide(q_begin);
  int before, tiles, q_tiles = axis.q_tiles;
  if (plan.is_additional) {
    // In the separate launch for additional tokens, query tiles are tiles of the undilated layout. All these query
    // tiles attend to all additional tokens.
    before = d < 2 ? 0 : plan.kv_begin.z / p.kv_tile_tokens;
    tiles = 1;
    q_tiles = axis.by_q_tile.divide(axis.query_local_extent + axis.q_tile - 1);
  } else {
    const KeyAxisPlan& own = plan.axis[d];
    const int first_query = max(q_begin + own.query.shift, 0);
    const int last_query =
        min(min(q_begin + axis.q_tile, own.query.local_length) + own.query.shift, own.query.length) - 1;
    const EntryWindows windows = own.windows(axis);
    const int begin = window_bounds(windows, first_query, own.kv.length).begin - own.kv.shift;
    const int end = window_bounds(windows, last_query, own.kv.length).end - own.kv.shift;
    const int lowest = axis.by_kv_tile.divide(max(begin, 0));
    const int highest = axis.by_kv_tile.divide(min(end, own.kv.local_length) - 1);
    before = p.schedule.addition_order[d].before(axis.by_kv_tile.divide(own.kv_begin), lowest, highest);
    tiles = highest - lowest + 1;
  }
  return {
      (broadcast_lane(q_tile, 0) * broadcast_lane(q_tiles, 1) + broadcast_lane(q_tile, 1)) *
              broadcast_lane(q_tiles, 2) +
          broadcast_lane(q_tile, 2),
      (broadcast_lane(before, 0) * broadcast_lane(tiles, 1) + broadcast_lane(before, 1)) * broadcast_lane(tiles, 2) +
          broadcast_lane(before, 2)};
}

}  // namespace natten_jax::sm90
