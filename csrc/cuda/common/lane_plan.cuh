// Plans of query tiles. A warp computes a plan, and each of its lanes plans one dimension.
#pragma once

#include <cute/config.hpp>

#include "cuda/common/axis_plan.cuh"
#include "cuda/common/tile_scheduler.h"

namespace natten_jax {

/// Broadcasts a value of one lane to the warp.
CUTE_DEVICE int broadcast_lane(int value, int lane) {
  return __shfl_sync(0xffffffffu, value, lane);
}
CUTE_DEVICE GroupTokens broadcast_lane(GroupTokens tokens, int lane) {
  return {broadcast_lane(tokens.residue, lane), broadcast_lane(tokens.shift, lane),
          broadcast_lane(tokens.local_length, lane), broadcast_lane(tokens.length, lane)};
}
CUTE_DEVICE QueryAxisPlan broadcast_lane(QueryAxisPlan plan, int lane) {
  plan.query = broadcast_lane(plan.query, lane);
  plan.kv = broadcast_lane(plan.kv, lane);
  plan.q_begin = broadcast_lane(plan.q_begin, lane);
  plan.kernel_size = broadcast_lane(plan.kernel_size, lane);
  plan.stride = broadcast_lane(plan.stride, lane);
  return plan;
}

/// Dimension that this lane plans. Lanes from 2 on plan the last dimension.
CUTE_DEVICE int planned_dimension() {
  return min(static_cast<int>(threadIdx.x % 32), 2);
}

/// Index of a token in its batch entry. `coordinate` is the token's coordinate in the dimension that this lane plans.
CUTE_DEVICE int token_number(int coordinate, int y_extent, int z_extent) {
  return (broadcast_lane(coordinate, 0) * y_extent + broadcast_lane(coordinate, 1)) * z_extent +
         broadcast_lane(coordinate, 2);
}

/// Plan of a query tile in the dimension that this lane plans.
///
/// Args:
///   axis: axes of the launch.
///   position: position of the tile.
///   entry: the lane's dimension of the tile's batch entry.
CUTE_DEVICE QueryAxisPlan plan_axis(const DeviceAxis (&axis)[3], const TilePosition& position, const EntryAxis& entry) {
  const int d = planned_dimension();
  const int index = d == 0 ? position.index[0] : d == 1 ? position.index[1] : position.index[2];
  const int residue = d == 0 ? position.residue[0] : d == 1 ? position.residue[1] : position.residue[2];
  return QueryAxisPlan(axis[d], entry, residue, QueryTileSchedule::latest_first(axis[d], index));
}

/// Plan of a query tile in the dimension that this lane plans. `tile` is the number of the tile. Also sets the tile's
/// batch entry and head.
///
/// `kIsPlain`: see EntryWindows.
template <bool kIsPlain, class Params>
CUTE_DEVICE QueryAxisPlan plan_axis(const Params& p, int tile, int& batch, int& head) {
  const TilePosition position = p.schedule.locate(p.axis, tile);
  batch = position.batch;
  head = position.head;
  const int d = planned_dimension(), dilation = p.axis[d].dilation;
  if (!kIsPlain && p.layouts != nullptr) {
    return plan_axis(p.axis, position, EntryAxis(p.axis[d], EntryLayout(p.layouts, batch), d));
  }
  const Origin query_origin = Origin::load(p.origins, d, dilation),
               kv_origin = Origin::load(p.origins, 3 + d, dilation);
  return plan_axis(p.axis, position, EntryAxis(p.axis[d], query_origin, kv_origin));
}

}  // namespace natten_jax
