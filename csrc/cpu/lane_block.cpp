#include "cpu/lane_block.h"

#include <algorithm>

namespace natten_jax::cpu {
namespace {

/// Ranges of stream tokens that owner tokens see, along one dimension of an item.
class Visibility {
 public:
  Visibility(const Plan& plan, const Item& item, int dim)
      : axis_(plan.problem.axes[dim]), owns_queries_(plan.pass != Pass::kKeyValueGradient) {
    if (item.owns_additional) {
      is_unmasked_ = true;
      local_ = {0, axis_.query.local_extent};
      return;
    }
    const std::int64_t group = item.segments[dim].group;
    local_ = (owns_queries_ ? axis_.kv : axis_.query).local_indices(axis_.window, group);
    key_length_ = group_length(axis_.window, axis_.kv.extent, group);
    query_length_ = group_length(axis_.window, axis_.query.extent, group);
  }

  Range<std::int64_t> visible_range(std::int64_t index) const {
    if (is_unmasked_) return local_;
    const Range<std::int64_t> range = owns_queries_
                                          ? window_bounds(axis_.window, index, key_length_)
                                          : inverse_window_bounds(axis_.window, index, query_length_, key_length_);
    // If the dimension wraps, the range may extend past its ends. The streaming code then selects the tokens of the
    // range that exist locally.
    return axis_.window.ends == Ends::kWrap ? range : intersection(range, local_);
  }

 private:
  const Axis& axis_;
  bool owns_queries_;
  bool is_unmasked_ = false;
  Range<std::int64_t> local_{0, 0};
  std::int64_t key_length_ = 0;
  std::int64_t query_length_ = 0;
};

TokenMap token_map(const Problem& problem, const Segment* segments, bool are_queries) {
  TokenMap map{0, {1, 1, 1}, {}};
  std::int64_t pitch = 1;
  for (int dim = kRank - 1; dim >= 0; --dim) {
    const Axis& axis = problem.axes[dim];
    const Tokens& tokens = are_queries ? axis.query : axis.kv;
    map.offset += (segments[dim].group - tokens.origin) * pitch;
    map.pitch[dim] = axis.window.dilation * pitch;
    pitch *= tokens.local_extent;
  }
  return map;
}

/// Array that contains the tokens of the owner side: the lanes hold some of its rows.
struct OwnerArray {
  TokenMap tokens;
  std::int64_t first_row;
  std::int64_t heads;
};

OwnerArray owner_array(const Plan& plan, const Item& item) {
  const Problem& p = plan.problem;
  if (item.owns_additional) {
    return {{0, {0, 0, 1}, {}}, item.batch * p.additional_kv * p.heads_kv + item.kv_head, p.heads_kv};
  }
  const bool owns_queries = plan.pass != Pass::kKeyValueGradient;
  const TokenMap tokens = token_map(p, item.segments, owns_queries);
  if (owns_queries) return {tokens, item.batch * p.queries() * p.heads + item.kv_head * p.heads_per_kv(), p.heads};
  return {tokens, item.batch * p.keys() * p.heads_kv + item.kv_head, p.heads_kv};
}

void fill_lanes(const Box& box, std::int64_t head_begin, std::int64_t head_end, const OwnerArray& owner,
                const Range<std::int64_t> (*visible)[kLanes], LaneBlock& block) {
  int lane = 0;
  std::int64_t at[kRank];
  for (std::int64_t head = head_begin; head < head_end; ++head) {
    for (at[0] = box.begin[0]; at[0] < box.end[0]; ++at[0]) {
      for (at[1] = box.begin[1]; at[1] < box.end[1]; ++at[1]) {
        for (at[2] = box.begin[2]; at[2] < box.end[2]; ++at[2], ++lane) {
          std::int64_t token = owner.tokens.offset;
          for (int dim = 0; dim < kRank; ++dim) {
            token += at[dim] * owner.tokens.pitch[dim];
            const Range<std::int64_t> range = visible[dim][at[dim] - box.begin[dim]];
            block.first[dim][lane] = static_cast<std::int32_t>(range.begin);
            block.last[dim][lane] = static_cast<std::int32_t>(range.end);
          }
          block.row[lane] = owner.first_row + token * owner.heads + head;
          block.head[lane] = static_cast<std::int32_t>(head);
        }
      }
    }
  }
  block.active = lane;
  for (; lane < kLanes; ++lane) {
    block.row[lane] = block.row[0];
    block.head[lane] = block.head[0];
    for (int dim = 0; dim < kRank; ++dim) {
      block.first[dim][lane] = block.first[dim][0];
      block.last[dim][lane] = block.last[dim][0];
    }
  }
}

/// Sets `bias_index` of a block. Its lanes and its hull must be set before.
void fill_bias_indices(const Plan& plan, const Box& box, const std::int64_t (&pitch)[kRank], LaneBlock& block) {
  const OffsetTable& offsets = plan.offsets;
  // Index of the bias entry for the first lane's token (the first token of `box`) and the first token of the hull. An
  // entry's index increases with the index of the key, and decreases with the index of the query.
  std::int64_t first_index = 0;
  for (int dim = 0; dim < kRank; ++dim) {
    first_index += (block.hull.begin[dim] - box.begin[dim]) * pitch[dim] + offsets.reach[dim] * offsets.pitch[dim];
  }
  std::int64_t at[kRank] = {0, 0, 0};
  for (int lane = 0; lane < block.active; ++lane) {
    std::int64_t index = first_index + block.head[lane] * offsets.entries;
    for (int dim = 0; dim < kRank; ++dim) index -= at[dim] * pitch[dim];
    block.bias_index[lane] = static_cast<std::int32_t>(index);
    for (int dim = kRank - 1; dim >= 0; --dim) {
      if (++at[dim] < box.end[dim] - box.begin[dim]) break;
      at[dim] = 0;
    }
  }
  std::fill(block.bias_index + block.active, block.bias_index + kLanes, block.bias_index[0]);
}

}  // namespace

std::int64_t make_lane_blocks(const Plan& plan, const Item& item, LaneBlock* blocks) {
  const OwnerArray owner = owner_array(plan, item);
  const Visibility visibility[kRank] = {{plan, item, 0}, {plan, item, 1}, {plan, item, 2}};
  const std::int64_t heads = plan.pass == Pass::kKeyValueGradient ? 1 : plan.problem.heads_per_kv();
  // Additional keys have one dimension, so a lane block of them does not have the shape of `lane_box`.
  const std::int64_t line[kRank] = {1, 1, kLanes};
  const std::int64_t* extent = item.owns_additional ? line : plan.lane_box;

  const bool has_bias_indices = plan.arrays.relative_bias != nullptr && !item.owns_additional;
  std::int64_t pitch[kRank];
  table_pitch(plan, pitch);

  std::int64_t count = 0;
  Box box;
  Range<std::int64_t> visible[kRank][kLanes];
  const auto clip = [&](int dim) {
    box.end[dim] = std::min(box.begin[dim] + extent[dim], item.segments[dim].end);
    for (std::int64_t i = box.begin[dim]; i < box.end[dim]; ++i) {
      visible[dim][i - box.begin[dim]] = visibility[dim].visible_range(i);
    }
  };
  const Segment* s = item.segments;
  for (box.begin[0] = s[0].begin; box.begin[0] < s[0].end; box.begin[0] += extent[0]) {
    clip(0);
    for (box.begin[1] = s[1].begin; box.begin[1] < s[1].end; box.begin[1] += extent[1]) {
      clip(1);
      for (box.begin[2] = s[2].begin; box.begin[2] < s[2].end; box.begin[2] += extent[2]) {
        clip(2);
        Box hull;
        Box core;
        for (int dim = 0; dim < kRank; ++dim) {
          const Range<std::int64_t> at_begin = visible[dim][0];
          Range<std::int64_t> all = at_begin;
          Range<std::int64_t> common = at_begin;
          for (std::int64_t i = 1; i < box.end[dim] - box.begin[dim]; ++i) {
            all.begin = std::min(all.begin, visible[dim][i].begin);
            all.end = std::max(all.end, visible[dim][i].end);
            common = intersection(common, visible[dim][i]);
          }
          hull.begin[dim] = all.begin;
          hull.end[dim] = all.end;
          core.begin[dim] = common.begin;
          core.end[dim] = common.end;
        }
        for (std::int64_t head = 0; head < heads; head += plan.lane_heads) {
          LaneBlock& block = blocks[count++];
          block.hull = hull;
          block.core = core;
          fill_lanes(box, head, std::min(head + plan.lane_heads, heads), owner, visible, block);
          if (has_bias_indices) fill_bias_indices(plan, box, pitch, block);
        }
      }
    }
  }
  return count;
}

Box enclosing_hull(const LaneBlock* blocks, std::int64_t count) {
  Box box{{0, 0, 0}, {0, 0, 0}};
  bool found = false;
  for (std::int64_t i = 0; i < count; ++i) {
    const Box& hull = blocks[i].hull;
    if (hull.empty()) continue;
    for (int dim = 0; dim < kRank; ++dim) {
      box.begin[dim] = found ? std::min(box.begin[dim], hull.begin[dim]) : hull.begin[dim];
      box.end[dim] = found ? std::max(box.end[dim], hull.end[dim]) : hull.end[dim];
    }
    found = true;
  }
  return box;
}

void table_pitch(const Plan& plan, std::int64_t (&pitch)[kRank]) {
  const std::int64_t sign = plan.pass == Pass::kKeyValueGradient ? -1 : 1;
  for (int dim = 0; dim < kRank; ++dim) pitch[dim] = sign * plan.offsets.pitch[dim];
}

TokenMap stream_tokens(const Plan& plan, const Item& item) {
  if (item.owns_additional) {
    const Axis* axes = plan.problem.axes;
    return {0, {axes[1].query.local_extent * axes[2].query.local_extent, axes[2].query.local_extent, 1}, {}};
  }
  const bool streams_queries = plan.pass == Pass::kKeyValueGradient;
  TokenMap map = token_map(plan.problem, item.segments, streams_queries);
  for (int dim = 0; dim < kRank; ++dim) {
    const Axis& axis = plan.problem.axes[dim];
    if (axis.window.ends != Ends::kWrap) continue;
    const Tokens& tokens = streams_queries ? axis.query : axis.kv;
    map.repeated[dim] = {tokens.local_indices(axis.window, item.segments[dim].group),
                         tokens.extent / axis.window.dilation};
  }
  return map;
}

}  // namespace natten_jax::cpu
