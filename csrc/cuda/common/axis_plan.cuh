// One dimension of a tile: its dilation group on both sides, and what its tokens see or are seen by.
#pragma once

#include <cute/config.hpp>

#include "cuda/common/device_axis.h"
#include "natten_jax/windows.h"

namespace natten_jax {

/// An origin split by the dilation, rounded down: local coordinate 0 is token `index` of dilation group `group`.
struct Origin {
  int index, group;

  /// The origin at `index`, or zero where there are no origins.
  CUTE_DEVICE static Origin load(const std::int32_t* origins, int index, int dilation) {
    return origins == nullptr ? Origin{0, 0} : split(origins[index], dilation);
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

/// A dilation group in one dimension, named by a local token of the side that owns a tile.
struct GroupPair {
  int group;
  int own_residue, other_residue;  // local coordinate of the group's first token, modulo the dilation
  int own_shift, other_shift;      // index of the group's first local token

  CUTE_DEVICE GroupPair(const DeviceAxis& axis, int residue, Origin own, Origin other)
      : group(own.group + residue), own_residue(residue) {
    own_shift = own.index + (group >= axis.dilation);
    group -= group >= axis.dilation ? axis.dilation : 0;
    other_residue = group - other.group + (group < other.group ? axis.dilation : 0);
    other_shift = other.index + (group < other.group);
  }
};

/// One dimension of a query tile: a dilation group of local queries and the same group of local keys.
struct AxisPlan {
  int query_residue, kv_residue;  // local coordinate of the group's first token, modulo the dilation
  int query_shift, kv_shift;      // index of the group's first local token
  int queries, keys;              // local tokens of the group
  int length;                     // global keys of the group
  int q_begin;

  CUTE_DEVICE AxisPlan(const DeviceAxis& axis, int residue, int tile_index, Origin query, Origin kv)
      : query_residue(residue), q_begin(tile_index * axis.q_tile) {
    const GroupPair pair(axis, residue, query, kv);
    kv_residue = pair.other_residue;
    query_shift = pair.own_shift;
    kv_shift = pair.other_shift;
    queries = group_length(axis, axis.query_local_extent, residue);
    keys = group_length(axis, axis.kv_local_extent, kv_residue);
    length = group_length(axis, axis.kv_extent, pair.group);
  }

  /// Local keys that the query at `coordinate` of the tile sees; past the layout, those of the last query. Both ends
  /// are clamped: an origin that places queries far outside the layout must not make ranges that overflow.
  CUTE_DEVICE int2 seen(const DeviceAxis& axis, int coordinate) const {
    const auto window = window_bounds(axis, min(q_begin + coordinate, queries - 1) + query_shift, length);
    return make_int2(max(window.begin - kv_shift, 0), min(max(window.end - kv_shift, 0), keys));
  }
};

/// One dimension of a key/value tile: a dilation group of local keys and the same group of local queries.
struct KeyAxisPlan {
  int query_residue, kv_residue;  // as in AxisPlan
  int query_shift, kv_shift;
  int queries, keys;
  int query_length, key_length;  // global tokens of the group
  int kv_begin;
  int first, last;  // keys of the tile that lie in the local and the global layout; none where last < first

  CUTE_DEVICE KeyAxisPlan(const DeviceAxis& axis, int residue, int tile_index, Origin query, Origin kv)
      : kv_residue(residue), kv_begin(tile_index * axis.kv_tile) {
    const GroupPair pair(axis, residue, kv, query);
    query_residue = pair.other_residue;
    query_shift = pair.other_shift;
    kv_shift = pair.own_shift;
    queries = group_length(axis, axis.query_local_extent, query_residue);
    keys = group_length(axis, axis.kv_local_extent, residue);
    query_length = group_length(axis, axis.query_extent, pair.group);
    key_length = group_length(axis, axis.kv_extent, pair.group);
    first = max(kv_begin, -kv_shift);
    last = min(min(kv_begin + axis.kv_tile, keys), key_length - kv_shift) - 1;
  }

  /// Whether every key of the tile lies in the layouts.
  CUTE_DEVICE bool is_whole(const DeviceAxis& axis) const {
    return first == kv_begin && last == kv_begin + axis.kv_tile - 1;
  }

  /// Local queries that see a local key; none where the key lies outside the layouts.
  CUTE_DEVICE int2 seen_by(const DeviceAxis& axis, int key) const {
    if (key < first || key > last) return make_int2(0, 0);
    const auto window = inverse_window_bounds(axis, key + kv_shift, query_length, key_length);
    return make_int2(max(window.begin - query_shift, 0), min(max(window.end - query_shift, 0), queries));
  }
};

}  // namespace natten_jax
