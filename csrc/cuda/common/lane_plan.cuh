// Query tiles worked out by the lanes of a warp, a dimension each.
#pragma once

#include <cute/config.hpp>

#include "cuda/common/axis_plan.cuh"
#include "cuda/common/tile_scheduler.h"

namespace natten_jax {

/// What lanes of a warp hold for each other.
CUTE_DEVICE int of_lane(int value, int lane) {
  return __shfl_sync(0xffffffffu, value, lane);
}
CUTE_DEVICE GroupTokens of_lane(GroupTokens tokens, int lane) {
  return {of_lane(tokens.residue, lane), of_lane(tokens.shift, lane), of_lane(tokens.local_length, lane),
          of_lane(tokens.length, lane)};
}
CUTE_DEVICE QueryAxisPlan of_lane(QueryAxisPlan plan, int lane) {
  plan.query = of_lane(plan.query, lane);
  plan.kv = of_lane(plan.kv, lane);
  plan.q_begin = of_lane(plan.q_begin, lane);
  return plan;
}

/// The dimension of a tile that a lane plans.
CUTE_DEVICE int planned_dimension() {
  return min(static_cast<int>(threadIdx.x % 32), 2);
}

/// A token's number in a batch entry from its coordinates, of which each lane has that of the dimension it plans.
CUTE_DEVICE int token_number(int coordinate, int y_extent, int z_extent) {
  return (of_lane(coordinate, 0) * y_extent + of_lane(coordinate, 1)) * z_extent + of_lane(coordinate, 2);
}

/// The dimension's share of a query tile.
///
/// Args:
///   axis: of the launch.
///   place: of the tile.
///   query_origin, kv_origin: of the dimension.
CUTE_DEVICE QueryAxisPlan plan_axis(const DeviceAxis (&axis)[3], const TilePlace& place, Origin query_origin,
                                    Origin kv_origin) {
  const int d = planned_dimension();
  const int index = d == 0 ? place.index[0] : d == 1 ? place.index[1] : place.index[2];
  const int residue = d == 0 ? place.residue[0] : d == 1 ? place.residue[1] : place.residue[2];
  return QueryAxisPlan(axis[d], residue, QueryTileSchedule::latest_first(axis[d], index), query_origin, kv_origin);
}

/// The same for the tile of a number, with its batch entry and head.
template <class Params>
CUTE_DEVICE QueryAxisPlan plan_axis(const Params& p, Origin query_origin, Origin kv_origin, int tile, int& batch,
                                    int& head) {
  const TilePlace place = p.schedule.place(p.axis, tile);
  batch = place.batch;
  head = place.head;
  return plan_axis(p.axis, place, query_origin, kv_origin);
}

}  // namespace natten_jax
