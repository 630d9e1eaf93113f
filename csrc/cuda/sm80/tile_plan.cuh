// What a CTA of the forward kernel needs to know of its query tile.
#pragma once

#include "cuda/common/axis_plan.cuh"
#include "cuda/sm80/params.h"

namespace natten_jax::sm80 {

/// What all threads share, in shared memory.
struct TilePlan {
  int4 hull_begin, hull_end;    // local keys that some row sees: x, y, z
  int4 inner_begin, inner_end;  // local keys that every row sees
  int4 key_pitch;               // tokens between neighbors of the dilation group: x, y, z; its first token
  const char* keys[2];          // of the batch entry and head: keys, additional keys
  const char* values[2];
  bool needs_mask;  // some tile is not seen whole by every row
};

/// A query tile of one head, in every thread's registers.
struct QueryTile {
  int batch, head;
  AxisPlan axes[3];

  /// Local keys that the row's query sees in a dimension.
  CUTE_DEVICE int2 seen(const ForwardParams& p, int d, int coordinate) const {
    return axes[d].seen(p.axis[d], coordinate);
  }

  /// Token of the query at a place in the tile, or -1.
  CUTE_DEVICE int token(const ForwardParams& p, const int (&coordinates)[3]) const {
    int token = 0;
    bool is_inside = true;
    CUTE_UNROLL
    for (int d = 0; d < 3; ++d) {
      const int index = axes[d].q_begin + coordinates[d];
      is_inside = is_inside && index < axes[d].queries;
      token = token * p.axis[d].query_extent + index * p.axis[d].dilation + axes[d].query_residue;
    }
    return is_inside ? token : -1;
  }
};

/// The tile with a number; from the slowest: batch, block of heads, dilation group, query tile, head.
CUTE_DEVICE QueryTile find_tile(const ForwardParams& p, int number) {
  int outer, in_group, group, batch, head, head_block, tile_index[3], residue[3];
  p.by_heads_per_block(outer, head, number);
  p.by_tiles_per_group(outer, in_group, outer);
  p.axis[2].by_q_tiles(in_group, tile_index[2], in_group);
  p.axis[1].by_q_tiles(tile_index[0], tile_index[1], in_group);
  p.by_groups(outer, group, outer);
  p.by_head_blocks(batch, head_block, outer);
  head += head_block * p.heads_per_block;
  p.axis[2].by_dilation(group, residue[2], group);
  p.axis[1].by_dilation(residue[0], residue[1], group);
  const auto axis_plan = [&](int d) {
    const Axis& axis = p.axis[d];
    // Late queries of a causal dimension see the most keys: the longest work comes first.
    if (axis.is_causal) tile_index[d] = axis.q_tiles - 1 - tile_index[d];
    return AxisPlan(axis, residue[d], tile_index[d], Origin::load(p.origins, d, axis.dilation),
                    Origin::load(p.origins, 3 + d, axis.dilation));
  };
  return {batch, head, {axis_plan(0), axis_plan(1), axis_plan(2)}};
}

/// Fills in what the threads share; one thread does. Tiles are read in steps of `kColumns` keys.
template <class Element, int kColumns>
CUTE_DEVICE void share_plan(const ForwardParams& p, const QueryTile& tile, TilePlan& plan) {
  int hull_begin[3], hull_end[3], inner_begin[3], inner_end[3], pitch[3];
  int first_token = 0, tokens = 1;
  bool is_whole = true;
  CUTE_UNROLL
  for (int d = 0; d < 3; ++d) {
    const int2 first = tile.seen(p, d, 0), last = tile.seen(p, d, p.axis[d].q_tile - 1);
    hull_begin[d] = first.x;
    hull_end[d] = last.y;
    inner_begin[d] = last.x;
    inner_end[d] = first.y;
    is_whole = is_whole && first.x == last.x && first.y == last.y && p.axis[d].by_kv_tile.rem(last.y - first.x) == 0;
    first_token = first_token * p.axis[d].kv_extent + tile.axes[d].kv_residue;
  }
  CUTE_UNROLL
  for (int d = 2; d >= 0; --d) {
    pitch[d] = tokens * p.axis[d].dilation;
    tokens *= p.axis[d].kv_extent;
  }
  plan.needs_mask = !is_whole || p.kv_tile_tokens % kColumns != 0;
  plan.hull_begin = make_int4(hull_begin[0], hull_begin[1], hull_begin[2], 0);
  plan.hull_end = make_int4(hull_end[0], hull_end[1], hull_end[2], 0);
  plan.inner_begin = make_int4(inner_begin[0], inner_begin[1], inner_begin[2], 0);
  plan.inner_end = make_int4(inner_end[0], inner_end[1], inner_end[2], 0);
  plan.key_pitch = make_int4(pitch[0], pitch[1], pitch[2], first_token);
  const int kv_head = p.by_heads_per_kv.divide(tile.head);
  const auto of_head = [&](const void* data, std::int64_t tokens, int head_dim) {
    return static_cast<const char*>(data) +
           (tile.batch * tokens * p.heads_kv + kv_head) * head_dim * static_cast<std::int64_t>(sizeof(Element));
  };
  plan.keys[0] = of_head(p.key, p.keys, p.head_dim);
  plan.keys[1] = of_head(p.additional_keys, p.additional_kv, p.head_dim);
  plan.values[0] = of_head(p.value, p.keys, p.head_dim_v);
  plan.values[1] = of_head(p.additional_values, p.additional_kv, p.head_dim_v);
}

}  // namespace natten_jax::sm80
