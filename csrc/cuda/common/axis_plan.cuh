// One dimension of a tile: its dilation group on both sides, and what its tokens see or are seen by.
#pragma once

#include <cute/config.hpp>

#include "cuda/common/device_axis.h"
#include "cuda/common/launch.cuh"
#include "natten_jax/windows.h"

namespace natten_jax {

/// An origin split by the dilation, rounded down: local coordinate 0 is token `index` of dilation group `group`.
struct Origin {
  int index, group;

  /// The origin at `index`, or zero where there are no origins.
  CUTE_DEVICE static Origin load(const std::int32_t* origins, int index, int dilation) {
    return origins == nullptr ? Origin{0, 0} : split(load_written(origins + index), dilation);
  }

  CUTE_DEVICE static Origin split(int origin, int dilation) {
    if (dilation == 1) return {origin, 0};
    int index = origin / dilation, group = origin % dilation;
    if (group < 0) {
      group += dilation;
      --index;
    }
    return {index, group};
  }
};

/// The dilation group that local tokens belong to whose coordinates are `residue` modulo the dilation.
CUTE_DEVICE int group_of(const DeviceAxis& axis, int residue, Origin origin) {
  const int group = origin.group + residue;
  return group - (group >= axis.dilation ? axis.dilation : 0);
}

/// A dilation group's tokens on one side of a dimension.
struct GroupTokens {
  int residue;       // local coordinate of the first local one, modulo the dilation
  int shift;         // its index
  int local_length;  // local tokens
  int length;        // global tokens

  CUTE_DEVICE static GroupTokens of_queries(const DeviceAxis& axis, int group, Origin origin) {
    return of_side(axis, group, origin, axis.query_local_extent, axis.query_extent);
  }
  CUTE_DEVICE static GroupTokens of_keys(const DeviceAxis& axis, int group, Origin origin) {
    return of_side(axis, group, origin, axis.kv_local_extent, axis.kv_extent);
  }

 private:
  CUTE_DEVICE static GroupTokens of_side(const DeviceAxis& axis, int group, Origin origin, int local_extent,
                                         int extent) {
    const bool is_before = group < origin.group;
    const int residue = group - origin.group + (is_before ? axis.dilation : 0);
    return {residue, origin.index + is_before, group_length(axis, local_extent, residue),
            group_length(axis, extent, group)};
  }
};

/// One dimension of a query tile.
struct QueryAxisPlan {
  GroupTokens query, kv;
  int q_begin;

  CUTE_DEVICE QueryAxisPlan(const DeviceAxis& axis, int residue, int tile_index, Origin query_origin, Origin kv_origin)
      : query(GroupTokens::of_queries(axis, group_of(axis, residue, query_origin), query_origin)),
        kv(GroupTokens::of_keys(axis, group_of(axis, residue, query_origin), kv_origin)),
        q_begin(tile_index * axis.q_tile) {}

  /// Local keys that the query at `coordinate` of the tile sees; past the layout, those of the last query. Both ends
  /// are clamped: an origin that places queries far outside the layout must not make ranges that overflow.
  CUTE_DEVICE int2 seen(const DeviceAxis& axis, int coordinate) const {
    const int index = min(q_begin + coordinate, query.local_length - 1) + query.shift;
    const auto window = window_bounds(axis, index, kv.length);
    return make_int2(max(window.begin - kv.shift, 0), min(max(window.end - kv.shift, 0), kv.local_length));
  }
};

/// One dimension of a key/value tile.
struct KeyAxisPlan {
  GroupTokens query, kv;
  int kv_begin;
  int first, last;  // keys of the tile that lie in the local and the global layout; none where last < first

  CUTE_DEVICE KeyAxisPlan(const DeviceAxis& axis, int residue, int tile_index, Origin query_origin, Origin kv_origin)
      : query(GroupTokens::of_queries(axis, group_of(axis, residue, kv_origin), query_origin)),
        kv(GroupTokens::of_keys(axis, group_of(axis, residue, kv_origin), kv_origin)),
        kv_begin(tile_index * axis.kv_tile),
        first(max(kv_begin, -kv.shift)),
        last(min(min(kv_begin + axis.kv_tile, kv.local_length), kv.length - kv.shift) - 1) {}

  /// Whether every key of the tile lies in the layouts.
  CUTE_DEVICE bool is_whole(const DeviceAxis& axis) const {
    return first == kv_begin && last == kv_begin + axis.kv_tile - 1;
  }

  /// Local queries that see a local key; none where the key lies outside the layouts.
  CUTE_DEVICE int2 seen_by(const DeviceAxis& axis, int key) const {
    if (key < first || key > last) return make_int2(0, 0);
    const auto window = inverse_window_bounds(axis, key + kv.shift, query.length, kv.length);
    return make_int2(max(window.begin - query.shift, 0), min(max(window.end - query.shift, 0), query.local_length));
  }
};

}  // namespace natten_jax
