// Query tiles worked out by the lanes of a warp, a dimension each.
#pragma once

#include <cute/config.hpp>

#include "cuda/common/axis_plan.cuh"

namespace natten_jax {

/// What lanes of a warp hold for each other.
CUTE_DEVICE int of_lane(int value, int lane) {
  return __shfl_sync(0xffffffffu, value, lane);
}
/// Without kv_residue.
CUTE_DEVICE AxisPlan of_lane(AxisPlan plan, int lane) {
  plan.query_residue = of_lane(plan.query_residue, lane);
  plan.q_begin = of_lane(plan.q_begin, lane);
  plan.queries = of_lane(plan.queries, lane);
  plan.query_shift = of_lane(plan.query_shift, lane);
  plan.kv_shift = of_lane(plan.kv_shift, lane);
  plan.keys = of_lane(plan.keys, lane);
  plan.length = of_lane(plan.length, lane);
  return plan;
}

/// The dimension of a tile that a lane plans.
CUTE_DEVICE int planned_dimension() {
  return min(static_cast<int>(threadIdx.x % 32), 2);
}

/// The dimension's share of a tile.
///
/// Args:
///   p: the launch; its Params have the axes and the divisors that a tile's number is taken apart with.
///   query_origin, kv_origin: of the dimension.
///   tile: number of the tile; from the slowest: batch, block of heads, dilation group, query tile, head.
///   batch, head: results.
template <class Params>
CUTE_DEVICE AxisPlan plan_axis(const Params& p, Origin query_origin, Origin kv_origin, int tile, int& batch,
                               int& head) {
  int outer, in_group, group, head_block, tile_x, tile_y, tile_z, residue_x, residue_y, residue_z;
  p.by_heads_per_block(outer, head, tile);
  p.by_tiles_per_group(outer, in_group, outer);
  p.axis[2].by_q_tiles(in_group, tile_z, in_group);
  p.axis[1].by_q_tiles(tile_x, tile_y, in_group);
  p.by_groups(outer, group, outer);
  p.by_head_blocks(batch, head_block, outer);
  head += head_block * p.heads_per_block;
  p.axis[2].by_dilation(group, residue_z, group);
  p.axis[1].by_dilation(residue_x, residue_y, group);
  const int d = planned_dimension();
  const DeviceAxis& axis = p.axis[d];
  int tile_index = d == 0 ? tile_x : d == 1 ? tile_y : tile_z;
  // Late queries of a causal dimension see the most keys: the longest work comes first.
  if (axis.is_causal) tile_index = axis.q_tiles - 1 - tile_index;
  return AxisPlan(axis, d == 0 ? residue_x : d == 1 ? residue_y : residue_z, tile_index, query_origin, kv_origin);
}

}  // namespace natten_jax
