// What a query tile of the Hopper kernels needs to know, worked out ahead of the loads and products.
#pragma once

#include <cute/config.hpp>

#include "cuda/common/axis_plan.cuh"
#include "cuda/sm90/params.h"

namespace natten_jax::sm90 {

constexpr int kRows = 128;  // query rows of a tile

struct TilePlan {
  int4 hull_begin, hull_end;    // local keys that some row sees: x, y, z
  int4 inner_begin, inner_end;  // local keys that every row sees
  int4 q_begin;                 // first query index
  int batch, head, kv_head;
  int kv_tiles;                                               // negative: there are no more tiles
  int query_map, kv_map;                                      // classes of the dilation group
  int query_column, key_column, value_column, output_column;  // where head and group start in dimension 0 of the maps
  // Per coordinate inside the query tile: first key seen and end of the keys seen; those of x, of y, of z.
  int2 windows[kRows + 2];
  // Per row: first key seen (x, y, z) and the row's token, or -1; end of the keys seen (x, y, z).
  int4 row_windows[kRows][2];
};

CUTE_DEVICE int4 packed(const int (&v)[3]) {
  return make_int4(v[0], v[1], v[2], 0);
}

/// Fills in `plan`; false where the tile lies past its dilation group's end. All lanes of a warp take part.
///
/// Args:
///   p: the launch.
///   origins: of query and key/value tokens, three each.
///   row_coordinates: of each row in the query tile: x, y, z.
///   tile: number of the tile; from the slowest: batch, block of heads, dilation group, query tile, head.
///   plan: the result.
CUTE_DEVICE bool plan_tile(const ForwardParams& p, const Origin* origins, const uchar4* row_coordinates, int tile,
                           TilePlan& plan) {
  int outer, in_group, group, batch, head, head_block, tile_index[3], residue[3];
  p.by_heads_per_block(outer, head, tile);
  p.by_tiles_per_group(outer, in_group, outer);
  p.axis[2].by_q_tiles(in_group, tile_index[2], in_group);
  p.axis[1].by_q_tiles(tile_index[0], tile_index[1], in_group);
  p.by_groups(outer, group, outer);
  p.by_head_blocks(batch, head_block, outer);
  head += head_block * p.heads_per_block;
  p.axis[2].by_dilation(group, residue[2], group);
  p.axis[1].by_dilation(residue[0], residue[1], group);

  const int lane = threadIdx.x % 32;
  int hull_begin[3], hull_end[3], inner_begin[3], inner_end[3], q_begin[3], kv_residue[3];
  int query_map = 0, kv_map = 0, kv_tiles = 1, first = 0;
  CUTE_UNROLL
  for (int d = 0; d < 3; ++d) {
    const Axis& axis = p.axis[d];
    // Late queries of a causal dimension see the most keys: the longest work comes first.
    if (axis.is_causal) tile_index[d] = axis.q_tiles - 1 - tile_index[d];
    const AxisPlan of_axis(axis, residue[d], tile_index[d], origins[d], origins[3 + d]);
    if (of_axis.q_begin >= of_axis.queries) return false;
    const int2 first_seen = of_axis.seen(axis, 0), last_seen = of_axis.seen(axis, axis.q_tile - 1);
    q_begin[d] = of_axis.q_begin;
    kv_residue[d] = of_axis.kv_residue;
    hull_begin[d] = first_seen.x;
    hull_end[d] = last_seen.y;
    inner_begin[d] = last_seen.x;
    inner_end[d] = first_seen.y;
    kv_tiles *= axis.by_kv_tile.divide(max(last_seen.y - first_seen.x, 0) + axis.kv_tile - 1);
    query_map = 2 * query_map + (of_axis.queries > axis.query_group_tokens);
    kv_map = 2 * kv_map + (of_axis.keys > axis.kv_group_tokens);
    for (int coordinate = lane; coordinate < axis.q_tile; coordinate += 32) {
      plan.windows[first + coordinate] = of_axis.seen(axis, coordinate);
    }
    first += axis.q_tile;
  }
  __syncwarp();
  for (int row = lane; row < kRows; row += 32) {
    const uchar4 in_tile = row_coordinates[row];
    const int2 x = plan.windows[in_tile.x], y = plan.windows[p.axis[0].q_tile + in_tile.y],
               z = plan.windows[p.axis[0].q_tile + p.axis[1].q_tile + in_tile.z];
    const int token_x = (q_begin[0] + in_tile.x) * p.axis[0].dilation + residue[0];
    const int token_y = (q_begin[1] + in_tile.y) * p.axis[1].dilation + residue[1];
    const int token_z = (q_begin[2] + in_tile.z) * p.axis[2].dilation + residue[2];
    const bool is_inside = row < p.q_tile_tokens && token_x < p.axis[0].query_extent &&
                           token_y < p.axis[1].query_extent && token_z < p.axis[2].query_extent;
    const int token = (token_x * p.axis[1].query_extent + token_y) * p.axis[2].query_extent + token_z;
    plan.row_windows[row][0] = make_int4(x.x, y.x, z.x, is_inside ? token : -1);
    plan.row_windows[row][1] = make_int4(x.y, y.y, z.y, 0);
  }
  if (lane == 0) {
    const int kv_head = p.by_heads_per_kv.divide(head);
    // Dilation is strided dimensions, with the group's first token folded into coordinate 0.
    const int q_token = (residue[0] * p.axis[1].query_extent + residue[1]) * p.axis[2].query_extent + residue[2];
    const int kv_token = (kv_residue[0] * p.axis[1].kv_extent + kv_residue[1]) * p.axis[2].kv_extent + kv_residue[2];
    plan.hull_begin = packed(hull_begin);
    plan.hull_end = packed(hull_end);
    plan.inner_begin = packed(inner_begin);
    plan.inner_end = packed(inner_end);
    plan.q_begin = packed(q_begin);
    plan.batch = batch;
    plan.head = head;
    plan.kv_head = kv_head;
    plan.kv_tiles = kv_tiles;
    plan.query_map = query_map;
    plan.kv_map = kv_map;
    plan.query_column = (q_token * p.heads + head) * p.head_dim;
    plan.output_column = (q_token * p.heads + head) * p.head_dim_v;
    plan.key_column = (kv_token * p.heads_kv + kv_head) * p.head_dim;
    plan.value_column = (kv_token * p.heads_kv + kv_head) * p.head_dim_v;
  }
  return true;
}

}  // namespace natten_jax::sm90
