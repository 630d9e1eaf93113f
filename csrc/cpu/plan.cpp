#include "cpu/plan.h"

#include <algorithm>
#include <limits>
#include <type_traits>

#include "cpu/lane_block.h"

namespace natten_jax::cpu {
namespace {

std::int64_t divide_up(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

std::int64_t divide_down(std::int64_t a, std::int64_t b) {
  return a >= 0 ? a / b : -divide_up(-a, b);
}

const Tokens& owner_side(const Axis& axis, Pass pass) {
  return pass == Pass::kKeyValueGradient ? axis.kv : axis.query;
}

const Tokens& stream_side(const Axis& axis, Pass pass) {
  return pass == Pass::kKeyValueGradient ? axis.query : axis.kv;
}

/// Divides the local tokens of every dilation group into segments along one dimension. Boundaries between segments are
/// multiples of `tile`.
std::vector<Segment> cut(const Axis& axis, Pass pass, std::int64_t tile) {
  const Tokens& tokens = owner_side(axis, pass);
  const std::int64_t dilation = axis.window.dilation;
  // If the dimension wraps, local tokens may lie before its start or after its end, because the layout repeats there.
  const bool wraps = axis.window.ends == Ends::kWrap;
  const std::int64_t first = wraps ? tokens.origin : std::max<std::int64_t>(tokens.origin, 0);
  const std::int64_t end = tokens.origin + tokens.local_extent;
  const std::int64_t last = std::min(wraps ? end : std::min(end, tokens.extent), first + dilation);
  std::vector<Segment> segments;
  // In every group that has local tokens, the first local token is among the first `dilation` local coordinates.
  for (std::int64_t coordinate = first; coordinate < last; ++coordinate) {
    const std::int64_t group = coordinate - divide_down(coordinate, dilation) * dilation;
    const Range<std::int64_t> local = tokens.local_indices(axis.window, group);
    for (std::int64_t begin = local.begin; begin < local.end;) {
      const std::int64_t end = std::min((divide_down(begin, tile) + 1) * tile, local.end);
      segments.push_back({group, begin, end});
      begin = end;
    }
  }
  return segments;
}

/// Number of stream tokens that a lane block of `count` owner tokens sees along one dimension, far from the edges.
double union_extent(const Axis& axis, std::int64_t count, std::int64_t tile) {
  // A block that starts at the start of a stride group contains tokens of the fewest stride groups.
  const std::int64_t stride = axis.window.stride;
  const bool is_aligned = count % stride == 0 && tile % count == 0;
  const std::int64_t span = is_aligned ? count - stride : divide_up(count - 1, stride) * stride;
  return static_cast<double>(std::min(axis.window.kernel_size + span, divide_up(axis.kv.extent, axis.window.dilation)));
}

/// Chooses the shape of the lane blocks such that the blocks of an item visit the fewest stream tokens in total.
///
/// If the box has fewer tokens than there are lanes, the other lanes hold the same tokens for further query heads that
/// share the KV head. If several shapes are equally good, the one with the most tokens in the last dimension is chosen,
/// because rows are contiguous in that dimension.
void choose_lane_box(Plan& plan, const std::int64_t* tile) {
  const Problem& p = plan.problem;
  const std::int64_t group_heads = plan.pass == Pass::kKeyValueGradient ? 1 : p.heads_per_kv();
  double best = std::numeric_limits<double>::infinity();
  for (std::int64_t x = 1; x <= kLanes; ++x) {
    for (std::int64_t y = 1; x * y <= kLanes; ++y) {
      for (std::int64_t z = 1; x * y * z <= kLanes; ++z) {
        const std::int64_t box[kRank] = {x, y, z};
        const std::int64_t heads = std::min(kLanes / (x * y * z), group_heads);
        double cost = static_cast<double>(divide_up(group_heads, heads));
        for (int dim = 0; dim < kRank; ++dim) {
          const Axis& axis = p.axes[dim];
          const std::int64_t group = divide_up(owner_side(axis, plan.pass).local_extent, axis.window.dilation);
          const std::int64_t owned = std::min(tile[dim], group);
          const double blocks = static_cast<double>(divide_up(owned, box[dim])) / static_cast<double>(owned);
          cost *= blocks * union_extent(axis, std::min(box[dim], owned), tile[dim]);
        }
        const bool is_tie = cost < best * (1 + 1e-9);
        const bool is_better = cost < best * (1 - 1e-9);
        if (is_better || (is_tie && z > plan.lane_box[2])) {
          best = std::min(best, cost);
          std::copy(box, box + kRank, plan.lane_box);
          plan.lane_heads = heads;
        }
      }
    }
  }
}

std::size_t count_lane_blocks(const Plan& plan, const std::int64_t* tile) {
  const std::int64_t group_heads = plan.pass == Pass::kKeyValueGradient ? 1 : plan.problem.heads_per_kv();
  std::int64_t count = divide_up(group_heads, plan.lane_heads);
  for (int dim = 0; dim < kRank; ++dim) {
    std::int64_t longest = 1;
    for (const Segment& s : plan.segments[dim]) longest = std::max(longest, s.end - s.begin);
    count *= divide_up(std::min(tile[dim], longest), plan.lane_box[dim]);
  }
  return static_cast<std::size_t>(count);
}

}  // namespace

std::int64_t Plan::items() const {
  const auto count = [](const std::vector<Segment>& s) { return static_cast<std::int64_t>(s.size()); };
  const std::int64_t tiles = count(segments[0]) * count(segments[1]) * count(segments[2]);
  return problem.batch * problem.heads_kv * (count(additional_segments) + tiles);
}

Item Plan::item(std::int64_t index) const {
  Item item{};
  const auto next = [&index](std::int64_t count) {
    const std::int64_t digit = index % count;
    index /= count;
    return digit;
  };
  const auto pick = [&next](const std::vector<Segment>& s) {
    return s[static_cast<std::size_t>(next(static_cast<std::int64_t>(s.size())))];
  };
  // Items that own additional keys come first, because they stream all queries and take longest.
  const std::int64_t additional =
      problem.batch * problem.heads_kv * static_cast<std::int64_t>(additional_segments.size());
  item.owns_additional = index < additional;
  if (item.owns_additional) {
    item.segments[0] = item.segments[1] = {0, 0, 1};
    item.segments[2] = pick(additional_segments);
  } else {
    index -= additional;
    // Neighboring tiles of a head are consecutive items, because they share stream tokens.
    for (int dim = kRank - 1; dim >= 0; --dim) item.segments[dim] = pick(segments[dim]);
  }
  item.kv_head = next(problem.heads_kv);
  item.batch = index;
  return item;
}

Workspace Plan::workspace(std::byte* scratch) const {
  const std::size_t lanes = lane_blocks * kLanes, rows = static_cast<std::size_t>(stream_tokens + kRowPadding);
  const std::size_t head_dim = static_cast<std::size_t>(problem.head_dim);
  const std::size_t head_dim_v = static_cast<std::size_t>(problem.head_dim_v);
  const std::size_t packed = problem.element_type == ElementType::kFloat32 ? 0 : rows;
  Workspace w{};
  const auto reserve = [&](auto*& buffer, std::size_t count) {
    using Pointer = std::remove_reference_t<decltype(buffer)>;
    if (scratch != nullptr) buffer = reinterpret_cast<Pointer>(scratch + w.bytes);
    w.bytes += (count * sizeof(*buffer) + 63) / 64 * 64;
  };
  reserve(w.lanes_a, lanes * head_dim);
  reserve(w.lanes_b, lanes * head_dim_v);
  reserve(w.sums_a, lanes * head_dim);
  reserve(w.sums_b, lanes * head_dim_v);
  reserve(w.statistics, lanes * kStatistics);
  reserve(w.blocks, lane_blocks);
  reserve(w.logits, rows * kLanes);
  reserve(w.products, rows * kLanes);
  reserve(w.rows_a, rows);
  reserve(w.rows_b, rows);
  reserve(w.row_values, kStatistics * rows);
  const bool has_table = pass == Pass::kQueryGradient && arrays.relative_bias != nullptr;
  reserve(w.table, has_table ? static_cast<std::size_t>(problem.heads_per_kv() * offsets.entries) : 0);
  reserve(w.packed_a, packed * head_dim);
  reserve(w.packed_b, packed * head_dim_v);
  reserve(w.lines, kLanes * std::max(head_dim, head_dim_v));
  return w;
}

Plan make_plan(const Problem& problem, const TileShapes& tiles, const Arrays& arrays, Pass pass) {
  Plan plan{};
  plan.problem = problem;
  plan.arrays = arrays;
  plan.pass = pass;
  plan.offsets = offset_table(problem.axes);
  const bool owns_queries = pass != Pass::kKeyValueGradient;
  const std::int64_t* owner_tile = owns_queries ? tiles.query : tiles.kv;
  const std::int64_t* stream_tile = owns_queries ? tiles.kv : tiles.query;
  plan.stream_tokens = 1;
  for (int dim = 0; dim < kRank; ++dim) {
    const Axis& axis = problem.axes[dim];
    plan.segments[dim] = cut(axis, pass, owner_tile[dim]);
    plan.stream_tile[dim] = std::min(stream_tile[dim], stream_side(axis, pass).local_extent);
    plan.stream_tokens *= plan.stream_tile[dim];
  }
  plan.stream_tokens = std::max(plan.stream_tokens, kMinStreamRows);
  choose_lane_box(plan, owner_tile);
  if (!owns_queries) {
    for (std::int64_t begin = 0; begin < problem.additional_kv; begin += kLanes) {
      plan.additional_segments.push_back({0, begin, std::min(begin + kLanes, problem.additional_kv)});
    }
  }
  plan.lane_blocks = count_lane_blocks(plan, owner_tile);
  return plan;
}

}  // namespace natten_jax::cpu
