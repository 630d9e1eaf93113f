// Plan of a tile in one dimension: the queries and keys of its dilation group, and the windows of its tokens.
#pragma once

#include <cute/config.hpp>

#include "cuda/common/entry_axis.cuh"
#include "natten_jax/windows.h"

namespace natten_jax {

/// Dilation group of the tokens whose local coordinates equal `residue` modulo the dilation.
CUTE_DEVICE int group_of(const DeviceAxis& axis, int residue, Origin origin) {
  const int group = origin.group + residue;
  return group - (group >= axis.dilation ? axis.dilation : 0);
}

/// Queries or keys of a dilation group in one dimension.
struct GroupTokens {
  int residue;       // local coordinate of the first local token, modulo the dilation
  int shift;         // index of the first local token in the global layout
  int local_length;  // number of local tokens
  int length;        // number of tokens in the global layout

  CUTE_DEVICE static GroupTokens for_queries(const DeviceAxis& axis, const EntryAxis& entry, int group) {
    return for_side(axis, group, entry.query_origin, entry.query_local_extent, entry.query_extent);
  }
  CUTE_DEVICE static GroupTokens for_keys(const DeviceAxis& axis, const EntryAxis& entry, int group) {
    return for_side(axis, group, entry.kv_origin, entry.kv_local_extent, entry.kv_extent);
  }

 private:
  CUTE_DEVICE static GroupTokens for_side(const DeviceAxis& axis, int group, Origin origin, int local_extent,
                                          int extent) {
    const bool is_before = group < origin.group;
    const int residue = group - origin.group + (is_before ? axis.dilation : 0);
    return {residue, origin.index + is_before, group_length(axis, local_extent, residue),
            group_length(axis, extent, group)};
  }
};

/// A query tile in one dimension.
struct QueryAxisPlan {
  GroupTokens query, kv;
  int q_begin;
  int kernel_size, stride;

  CUTE_DEVICE QueryAxisPlan(const DeviceAxis& axis, const EntryAxis& entry, int residue, int tile_index)
      : query(GroupTokens::for_queries(axis, entry, group_of(axis, residue, entry.query_origin))),
        kv(GroupTokens::for_keys(axis, entry, group_of(axis, residue, entry.query_origin))),
        q_begin(tile_index * axis.q_tile),
        kernel_size(entry.kernel_size),
        stride(entry.stride) {}

  /// Range of local keys that the query at `coordinate` of the tile attends to. If `coordinate` lies past the last
  /// query, returns the range of the last query. If the dimension wraps, the range may extend past the ends of the
  /// dimension. Otherwise, both bounds are clamped, so that ranges do not overflow if an origin places queries far
  /// outside the layout.
  ///
  /// `is_plain`: see EntryWindows.
  CUTE_DEVICE int2 visible_keys(const DeviceAxis& axis, int coordinate, bool is_plain = false) const {
    const int index = min(q_begin + coordinate, query.local_length - 1) + query.shift;
    const EntryWindows windows(axis, kernel_size, stride, is_plain);
    const auto window = window_bounds(windows, index, kv.length);
    if (windows.ends == Ends::kWrap) return make_int2(window.begin, window.end);
    return make_int2(max(window.begin - kv.shift, 0), min(max(window.end - kv.shift, 0), kv.local_length));
  }
};

/// A key/value tile in one dimension.
struct KeyAxisPlan {
  GroupTokens query, kv;
  int kv_begin;
  int first, last;  // local indices of the tile's keys inside array and layout; last < first: no keys
  int kernel_size, stride;

  CUTE_DEVICE KeyAxisPlan(const DeviceAxis& axis, const EntryAxis& entry, int residue, int tile_index)
      : query(GroupTokens::for_queries(axis, entry, group_of(axis, residue, entry.kv_origin))),
        kv(GroupTokens::for_keys(axis, entry, group_of(axis, residue, entry.kv_origin))),
        kv_begin(tile_index * axis.kv_tile),
        first(max(kv_begin, -kv.shift)),
        last(min(min(kv_begin + axis.kv_tile, kv.local_length), kv.length - kv.shift) - 1),
        kernel_size(entry.kernel_size),
        stride(entry.stride) {}

  CUTE_DEVICE EntryWindows windows(const DeviceAxis& axis, bool is_plain = false) const {
    return {axis, kernel_size, stride, is_plain};
  }

  /// True if every key of the tile lies in the array and in the layout.
  CUTE_DEVICE bool is_whole(const DeviceAxis& axis) const {
    return first == kv_begin && last == kv_begin + axis.kv_tile - 1;
  }

  /// Range of local queries that attend to a local key. Its bounds are clamped as in QueryAxisPlan::visible_keys. It is
  /// empty if the key lies outside the array or the layout.
  CUTE_DEVICE int2 attending_queries(const DeviceAxis& axis, int key, bool is_plain = false) const {
    if (key < first || key > last) return make_int2(0, 0);
    const EntryWindows own = windows(axis, is_plain);
    const auto window = inverse_window_bounds(own, key + kv.shift, query.length, kv.length);
    if (own.ends == Ends::kWrap) return make_int2(window.begin, window.end);
    return make_int2(max(window.begin - query.shift, 0), min(max(window.end - query.shift, 0), query.local_length));
  }
};

}  // namespace natten_jax
