// One dimension of a query tile: its dilation group on both sides, and the windows of its queries.
#pragma once

#include <cute/config.hpp>

#include "cuda/common/axis.h"
#include "natten_jax/windows.h"

namespace natten_jax {

/// window_bounds of natten_jax/windows.h with the division by multiplication.
CUTE_DEVICE Range<int> fast_window_bounds(const Axis& axis, int index, int length) {
  const int group_start = axis.by_stride.divide(index) * axis.stride;
  if (axis.is_causal) {
    const int leader = min(group_start + axis.stride - 1, length - 1);
    return {max(leader - axis.kernel_size + 1, 0), min(index + 1, length)};
  }
  const int leader = min(group_start + axis.stride / 2, length - 1);
  const int start = min(max(leader - axis.kernel_size / 2, 0), length - axis.kernel_size);
  return {start, start + axis.kernel_size};
}

/// An origin split by the dilation, rounded down: local coordinate 0 is token `index` of dilation group `group`.
struct Origin {
  int index, group;

  CUTE_DEVICE static Origin split(int origin, int dilation) {
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

  CUTE_DEVICE GroupPair(const Axis& axis, int residue, Origin own, Origin other)
      : group(own.group + residue), own_residue(residue) {
    own_shift = own.index + (group >= axis.dilation);
    group -= group >= axis.dilation ? axis.dilation : 0;
    other_residue = group - other.group + (group < other.group ? axis.dilation : 0);
    other_shift = other.index + (group < other.group);
  }
};

/// Tokens of a dilation group among `extent` tokens.
CUTE_DEVICE int fast_group_length(const Axis& axis, int extent, int residue) {
  return axis.by_dilation.divide(extent - residue + axis.dilation - 1);
}

/// One dimension of a query tile: a dilation group of local queries and the same group of local keys.
struct AxisPlan {
  int query_residue, kv_residue;  // local coordinate of the group's first token, modulo the dilation
  int query_shift, kv_shift;      // index of the group's first local token
  int queries, keys;              // local tokens of the group
  int length;                     // global keys of the group
  int q_begin;

  CUTE_DEVICE AxisPlan(const Axis& axis, int residue, int tile_index, Origin query, Origin kv)
      : query_residue(residue), q_begin(tile_index * axis.q_tile) {
    const GroupPair pair(axis, residue, query, kv);
    kv_residue = pair.other_residue;
    query_shift = pair.own_shift;
    kv_shift = pair.other_shift;
    queries = fast_group_length(axis, axis.query_extent, residue);
    keys = fast_group_length(axis, axis.kv_extent, kv_residue);
    length = fast_group_length(axis, axis.kv_layout, pair.group);
  }

  /// Local keys that the query at `coordinate` of the tile sees; past the layout, those of the last query.
  CUTE_DEVICE int2 seen(const Axis& axis, int coordinate) const {
    const auto window = fast_window_bounds(axis, min(q_begin + coordinate, queries - 1) + query_shift, length);
    return make_int2(max(window.begin - kv_shift, 0), min(window.end - kv_shift, keys));
  }
};

}  // namespace natten_jax
