// What a key/value tile of the Hopper backward kernel needs to know, worked out ahead of the loads and products.
#pragma once

#include "cuda/common/axis_plan.cuh"
#include "cuda/sm90/backward_params.h"

namespace natten_jax::sm90 {

template <int kKeys>
struct KeyTilePlan {
  int4 hull_begin, hull_end;    // local queries that see some key: x, y, z
  int4 inner_begin, inner_end;  // local queries that see every key
  int4 kv_begin;                // first key index
  int4 q_residue, q_step;       // local coordinate of the dilation group's first query, distance of its queries
  int batch, kv_head;
  int q_tiles;  // per query head; negative: there are no more key/value tiles
  bool is_additional;
  int query_map, kv_map;       // classes of the dilation group
  int q_token, kv_token;       // first tokens of the dilation group
  int2 windows[kKeys + 2];     // per coordinate inside the tile: first query and end of the queries that see it
  int4 row_windows[kKeys][2];  // per row: first query (x, y, z), end of the queries (x, y, z)
};

CUTE_DEVICE int4 packed(const int (&v)[3]) {
  return make_int4(v[0], v[1], v[2], 0);
}

/// Plans a tile of additional tokens, which every query sees.
template <int kKeys>
CUTE_DEVICE void plan_additional(const BackwardParams& p, int tile, KeyTilePlan<kKeys>& plan) {
  int outer, index, batch, kv_head;
  p.by_additional_tiles_per_head(outer, index, tile);
  p.by_heads_kv(batch, kv_head, outer);
  const int lane = threadIdx.x % 32, first = index * kKeys;
  const int4 begin = make_int4(0, 0, 0, 0);
  const int4 end = make_int4(p.axis[0].query_extent, p.axis[1].query_extent, p.axis[2].query_extent, 0);
  for (int row = lane; row < kKeys; row += 32) {
    plan.row_windows[row][0] = begin;
    plan.row_windows[row][1] = first + row < p.additional_kv ? end : begin;
  }
  if (lane == 0) {
    plan.hull_begin = plan.inner_begin = begin;
    plan.hull_end = end;
    plan.inner_end = first + kKeys <= p.additional_kv ? end : begin;
    plan.kv_begin = make_int4(0, 0, first, 0);
    plan.q_residue = begin;
    plan.q_step = make_int4(1, 1, 1, 0);
    plan.batch = batch;
    plan.kv_head = kv_head;
    plan.q_tiles = p.axis[0].by_q_tile.divide(end.x + p.axis[0].q_tile - 1) *
                   p.axis[1].by_q_tile.divide(end.y + p.axis[1].q_tile - 1) *
                   p.axis[2].by_q_tile.divide(end.z + p.axis[2].q_tile - 1);
    plan.is_additional = true;
    plan.query_map = kWholeLayout;
    plan.kv_map = 0;
    plan.q_token = plan.kv_token = 0;
  }
}

/// Fills in `plan`; false where the tile lies past its dilation group's end, or belongs to another lap. All lanes of a
/// warp take part.
///
/// Args:
///   p: the launch.
///   origins: of query and key/value tokens, three each.
///   row_coordinates: of each row in the key/value tile: x, y, z.
///   tile: number of the tile; from the slowest: batch, head, dilation group, tile.
///   wants_long: of two laps over the tiles, whether this is the one that takes the long ones.
///   plan: the result.
template <int kKeys>
CUTE_DEVICE bool plan_key_tile(const BackwardParams& p, const Origin* origins, const uchar4* row_coordinates, int tile,
                               bool wants_long, KeyTilePlan<kKeys>& plan) {
  if (tile < p.additional_tiles) {
    if (p.laps == 2 && !wants_long) return false;
    plan_additional(p, tile, plan);
    return true;
  }
  int outer, in_group, group, batch, kv_head, tile_index[3], residue[3];
  p.by_tiles_per_group(outer, in_group, tile - p.additional_tiles);
  p.axis[2].by_kv_tiles(in_group, tile_index[2], in_group);
  p.axis[1].by_kv_tiles(tile_index[0], tile_index[1], in_group);
  p.by_groups(outer, group, outer);
  p.by_heads_kv(batch, kv_head, outer);
  p.axis[2].by_dilation(group, residue[2], group);
  p.axis[1].by_dilation(residue[0], residue[1], group);

  const int lane = threadIdx.x % 32;
  int hull_begin[3], hull_end[3], inner_begin[3], inner_end[3], kv_begin[3], q_residue[3];
  int query_map = 0, kv_map = 0, q_tiles = 1, offset = 0;
  CUTE_UNROLL
  for (int d = 0; d < 3; ++d) {
    const Axis& axis = p.axis[d];
    const KeyAxisPlan of_axis(axis, residue[d], tile_index[d], origins[d], origins[3 + d]);
    if (of_axis.kv_begin >= of_axis.keys) return false;
    const int2 of_first = of_axis.seen_by(axis, of_axis.first), of_last = of_axis.seen_by(axis, of_axis.last);
    kv_begin[d] = of_axis.kv_begin;
    q_residue[d] = of_axis.query_residue;
    hull_begin[d] = of_first.x;
    hull_end[d] = of_last.y;
    inner_begin[d] = of_last.x;
    inner_end[d] = of_axis.is_whole(axis) ? of_first.y : of_last.x;
    q_tiles *= axis.by_q_tile.divide(max(of_last.y - of_first.x, 0) + axis.q_tile - 1);
    query_map = 2 * query_map + (of_axis.queries > axis.query_group_tokens);
    kv_map = 2 * kv_map + (of_axis.keys > axis.kv_group_tokens);
  }
  if (p.laps == 2 && wants_long != (q_tiles > p.longest_inner)) return false;
  CUTE_UNROLL
  for (int d = 0; d < 3; ++d) {
    const Axis& axis = p.axis[d];
    const KeyAxisPlan of_axis(axis, residue[d], tile_index[d], origins[d], origins[3 + d]);
    for (int coordinate = lane; coordinate < axis.kv_tile; coordinate += 32) {
      plan.windows[offset + coordinate] = of_axis.seen_by(axis, of_axis.kv_begin + coordinate);
    }
    offset += axis.kv_tile;
  }
  __syncwarp();
  for (int row = lane; row < kKeys; row += 32) {
    const uchar4 in_tile = row_coordinates[row];
    const int2 x = plan.windows[in_tile.x], y = plan.windows[p.axis[0].kv_tile + in_tile.y],
               z = plan.windows[p.axis[0].kv_tile + p.axis[1].kv_tile + in_tile.z];
    const bool is_inside = row < p.kv_tile_tokens;
    plan.row_windows[row][0] = make_int4(x.x, y.x, z.x, 0);
    plan.row_windows[row][1] = is_inside ? make_int4(x.y, y.y, z.y, 0) : make_int4(0, 0, 0, 0);
  }
  if (lane == 0) {
    // Dilation is strided dimensions, with the group's first token folded into coordinate 0.
    plan.q_token = (q_residue[0] * p.axis[1].query_extent + q_residue[1]) * p.axis[2].query_extent + q_residue[2];
    plan.kv_token = (residue[0] * p.axis[1].kv_extent + residue[1]) * p.axis[2].kv_extent + residue[2];
    plan.hull_begin = packed(hull_begin);
    plan.hull_end = packed(hull_end);
    plan.inner_begin = packed(inner_begin);
    plan.inner_end = packed(inner_end);
    plan.kv_begin = packed(kv_begin);
    plan.q_residue = packed(q_residue);
    plan.q_step = make_int4(p.axis[0].dilation, p.axis[1].dilation, p.axis[2].dilation, 0);
    plan.batch = batch;
    plan.kv_head = kv_head;
    plan.q_tiles = q_tiles;
    plan.is_additional = false;
    plan.query_map = query_map;
    plan.kv_map = kv_map;
  }
  return true;
}

}  // namespace natten_jax::sm90
