#include "cuda/small/region_launch.h"

#include <algorithm>

#include "cuda/small/bias_table.h"
#include "cuda/small/region_cache.h"
#include "cuda/small/region_time.h"
#include "natten_jax/logsumexp.h"

namespace natten_jax::small {
namespace {

/// Returns an array's pitch along a dimension: the distance between neighbors, in tokens.
std::int64_t pitch_of(const Problem& problem, int dimension, bool is_query) {
  std::int64_t pitch = 1;
  for (int d = dimension + 1; d < kRank; ++d) {
    const Axis& axis = problem.axes[d];
    pitch *= is_query ? axis.query.local_extent : axis.kv.local_extent;
  }
  return pitch;
}

/// Returns the difference between the numbers (TilePlan::number) of neighboring tiles along a dimension. The numbering
/// includes the tiles of all dilation groups.
std::int64_t tile_pitch_of(const Problem& problem, const std::int64_t (&rows)[kRank], int dimension) {
  std::int64_t pitch = 1;
  for (int d = dimension + 1; d < kRank; ++d) pitch *= query_tiles(problem.axes[d], rows[d]);
  return pitch;
}

/// Fills in the parameters for per-entry layouts. Returns the number of CTAs per region.
std::int64_t share_entries(const Problem& problem, Kernel kernel, const Device& device, CommonParams& p) {
  p.batch = static_cast<int>(problem.batch);
  p.entries_of_cta = static_cast<int>(std::min<std::int64_t>(problem.batch, kEntriesOfCta));
  // Number of consecutive query heads that always belong to the same piece of a group.
  const std::int64_t together = kernel == Kernel::kKeyValueGradient ? problem.heads_per_kv() : 1;
  const std::int64_t items = std::int64_t{p.entries_of_cta} * p.heads,
                     entry_sets = divide_up(problem.batch, p.entries_of_cta);
  const std::int64_t most = std::min(
      items, items_of_plan(kernel, compiled_head_dim(problem), p.region, device, p.region.count * entry_sets * items));
  p.region.items_of_cta = static_cast<int>(divide_up(most, together) * together);
  // The last piece of each group may be smaller than the others, so the number of pieces grows with the number of
  // groups. To estimate the number of groups, assume that a group has kEntriesOfGroup entries.
  constexpr std::int64_t kEntriesOfGroup = 8;
  std::int64_t pieces = divide_up(items, p.region.items_of_cta);
  if (pieces > 1) pieces += divide_up(p.entries_of_cta, kEntriesOfGroup);
  p.by_pieces = cutlass::FastDivmod(static_cast<int>(pieces));
  p.by_items = cutlass::FastDivmod(p.region.items_of_cta);
  return entry_sets * pieces;
}

}  // namespace

Coverage coverage_of(const Arrays& arrays) {
  if (arrays.layouts != nullptr) return Coverage::kPerEntry;
  return arrays.origins != nullptr ? Coverage::kParts : Coverage::kComplete;
}

Status prepare_regions(const Problem& problem, const std::int64_t (&rows)[kRank], const std::int64_t (&columns)[kRank],
                       Kernel kernel, const Arrays& arrays, const Device& device, cudaStream_t stream, CommonParams& p,
                       LaunchShape& shape) {
  const bool has_layouts = arrays.layouts != nullptr;
  const Coverage coverage = coverage_of(arrays);
  if (has_layouts && problem.has_relative_bias) {
    return Status::invalid_argument(
        "relative_bias and layouts were both given, but the kernels support only one of them");
  }
  if (has_layouts && problem.has_key_bias) {
    return Status::invalid_argument("key_bias and layouts were both given, but the kernels support only one of them");
  }
  if (wraps(problem) && (has_layouts || problem.has_relative_bias || problem.has_key_bias)) {
    return Status::invalid_argument(
        "with a dimension that wraps, the kernels for small windows support no layouts, relative_bias or key_bias");
  }
  NATTEN_JAX_RETURN_IF_FAILED(find_region(problem, rows, columns, kernel, coverage, device, p.region));
  const std::int64_t items = problem.batch * problem.heads;
  p.exponent_scale = problem.scale.uniform * kLog2E;
  p.is_plain = arrays.origins == nullptr;
  for (int i = 0; i < kRank; ++i) {
    const int d = p.region.dimension[i];
    p.axis[i] = device_axis(problem.axes[d], rows[d], columns[d]);
    p.query_pitch[i] = static_cast<int>(pitch_of(problem, d, true));
    p.kv_pitch[i] = static_cast<int>(pitch_of(problem, d, false));
    p.tile_pitch[i] = static_cast<int>(tile_pitch_of(problem, rows, d));
    for (const Tokens& tokens : {problem.axes[d].query, problem.axes[d].kv}) {
      p.is_plain &= tokens.extent == problem.axes[d].kv.extent && tokens.local_extent == tokens.extent;
    }
  }
  if (p.region.count > kMostTiles) return Status::invalid_argument("the problem has more than 2^30 regions");
  p.origins = arrays.origins;
  p.layouts = arrays.layouts;
  p.key_bias = {arrays.key_bias, arrays.key_bias_heads == 1, cutlass::FastDivmod(static_cast<int>(problem.heads_kv)),
                arrays.key_bias_gradient};
  fill_sizes(problem, p);
  p.keys = static_cast<int>(problem.keys());
  p.by_heads = cutlass::FastDivmod(p.heads);
  for (int i = 0; i < kRank; ++i) {
    // If a dimension has one token, it also has one token in the layout of every batch entry, unless that layout is
    // empty. The last dimension is an exception, because a sequence has separate lengths of queries and of keys.
    p.is_single[i] = p.is_plain && p.axis[i].query_extent == 1 && (!has_layouts || p.region.dimension[i] < kRank - 1);
    p.by_regions[i] = cutlass::FastDivmod(p.region.regions[i]);
    p.by_tiles[i] = cutlass::FastDivmod(p.region.tiles[i]);
    p.seam_regions[i] =
        seam_regions(problem.axes[p.region.dimension[i]], std::int64_t{p.region.tile[i]} * p.region.tiles[i],
                     p.region.regions[i], kernel == Kernel::kKeyValueGradient);
  }
  p.items = static_cast<int>(items);
  std::int64_t ctas = divide_up(items, p.region.items_of_cta);
  if (has_layouts) {
    ctas = share_entries(problem, kernel, device, p);
  }
  constexpr std::int64_t kMostCtas = 65535;  // per region
  if (ctas > kMostCtas) {
    return Status::invalid_argument(
        "the kernels for small windows support at most 65535 batch entries with separate layouts");
  }
  shape = {dim3(static_cast<unsigned>(p.region.count), static_cast<unsigned>(ctas)), 32 * p.region.warps,
           p.region.shared.bytes, stream};
  // With PDL, the key/value gradient kernel plans while the query gradient kernel runs. This requires code for an
  // architecture with TMA, because code for older architectures would not wait for the results of the query gradient
  // kernel.
  shape.overlaps = kernel == Kernel::kKeyValueGradient && device.has_boxes;
  return {};
}

}  // namespace natten_jax::small
