#include "cuda/small/region.h"

#include <algorithm>
#include <functional>
#include <iterator>

#include "cuda/small/region_shape.h"
#include "cuda/small/region_side.h"
#include "cuda/small/region_time.h"
#include "cuda/small/ring_shape.h"

namespace natten_jax::small {

Problem without_additional(Problem problem) {
  problem.additional_kv = 0;
  return problem;
}

int compiled_head_dim(const Problem& problem) {
  const std::int64_t wider = std::max(problem.head_dim, problem.head_dim_v);
  for (const int head_dim : kHeadDims) {
    if (wider <= head_dim) return head_dim;
  }
  return 0;
}

namespace {

/// Maximum dilation at which columns are loaded as a box.
constexpr std::int64_t kLargestBoxDilation = 8;

/// True if TMA can load a problem's columns. Heads must have the compiled width, additional tokens are not supported,
/// and dilations must be small.
bool can_have_boxes(const Problem& problem, int head_dim) {
  if (head_dim > kLargestBoxHeadDim || problem.head_dim != head_dim || problem.head_dim_v != head_dim) return false;
  if (problem.additional_kv > 0) return false;
  return std::all_of(std::begin(problem.axes), std::end(problem.axes),
                     [](const Axis& axis) { return axis.window.dilation <= kLargestBoxDilation; });
}

/// True if a region can be a whole dilation group: queries and keys are the same tokens, the arrays contain all of
/// them, and each query head has a separate key/value head. Extents are compared because a call without origins may
/// also have fewer queries than keys, if every query sees every key.
bool can_be_whole(const Problem& problem, Coverage coverage) {
  if (coverage != Coverage::kComplete || problem.heads != problem.heads_kv || wraps(problem)) return false;
  return std::all_of(std::begin(problem.axes), std::end(problem.axes), [](const Axis& axis) {
    const std::int64_t extent = axis.kv.extent;
    return axis.query.extent == extent && axis.query.local_extent == extent && axis.kv.local_extent == extent;
  });
}

/// Sets `region.tiles` to every combination of tiles per dimension that a CTA may have, and calls `call` for each one.
template <class Call>
void for_each_shape(const Side (&sides)[kRank], int warps, Region& region, const Call& call) {
  int most[kRank];
  for (int i = 0; i < kRank; ++i) {
    const std::int64_t tiles = divide_up(sides[region.dimension[i]].rows(), region.tile[i]);
    most[i] = static_cast<int>(std::min<std::int64_t>(tiles, 16));
  }
  auto& tiles = region.tiles;
  for (tiles[0] = 1; tiles[0] <= std::min(warps, most[0]); ++tiles[0]) {
    for (tiles[1] = 1; tiles[1] <= std::min(warps / tiles[0], most[1]); ++tiles[1]) {
      for (tiles[2] = 1; tiles[2] <= std::min(warps / tiles[0] / tiles[1], most[2]); ++tiles[2]) call();
    }
  }
}

Status too_large() {
  return Status::invalid_argument("the windows of a tile are too large for the kernels for small windows");
}

}  // namespace

Status for_each_region(const Problem& problem, const std::int64_t (&rows)[kRank], const std::int64_t (&columns)[kRank],
                       Kernel kernel, Coverage coverage, const Device& device,
                       const std::function<void(const Region&)>& call) {
  const Sides all(problem, kernel, coverage);
  const auto& sides = all.dimensions;
  Region candidate{};
  NATTEN_JAX_RETURN_IF_FAILED(begin_region(problem, sides, rows, columns, candidate));
  const int head_dim = compiled_head_dim(problem);
  // The query heads that share a key/value head count as one item if their gradients are added up.
  const std::int64_t together = kernel == Kernel::kKeyValueGradient ? problem.heads_per_kv() : 1;
  const std::int64_t items = problem.batch * problem.heads / together;
  const bool is_whole = kernel == Kernel::kWholeGradient, has_ring_costs = is_timed_against_rings(problem, coverage);
  if (is_whole && !can_be_whole(problem, coverage)) return {};
  for (const bool has_boxes : {true, false}) {
    if (has_boxes ? !(device.has_boxes && can_have_boxes(problem, head_dim)) : is_whole) continue;
    candidate.has_boxes = has_boxes;
    for_each_shape(sides, resident_warps(kernel, head_dim), candidate, [&] {
      // With per-entry layouts, a plan has few items. A second stage then saves less time than another CTA on the SM.
      // For example, the forward pass of NAT's first stage, with half of the tokens padding, took 58 microseconds on an
      // H100 with two stages and three CTAs per SM, and 48 with one stage and five CTAs. These times exclude filling
      // the padding.
      const int most_stages = coverage == Coverage::kPerEntry ? 1 : 2;
      for (int stages = 1; stages <= most_stages; ++stages) {
        if (!complete_region(problem, sides, kernel, head_dim, stages, device, candidate)) continue;
        const Shares shares = share_items(items, candidate, device);
        candidate.items_of_cta = static_cast<int>(shares.items_of_cta * together);
        candidate.nanoseconds = estimate(kernel, head_dim, coverage, candidate, shares, has_ring_costs);
        call(candidate);
      }
    });
  }
  return {};
}

Status choose_region(const Problem& problem, const std::int64_t (&rows)[kRank], const std::int64_t (&columns)[kRank],
                     Kernel kernel, Coverage coverage, const Device& device, Region& region) {
  bool found = false;
  const auto take_faster = [&](const Region& candidate) {
    if (found && candidate.nanoseconds >= region.nanoseconds) return;
    found = true;
    region = candidate;
  };
  NATTEN_JAX_RETURN_IF_FAILED(for_each_region(problem, rows, columns, kernel, coverage, device, take_faster));
  return found ? Status() : too_large();
}

Status estimate_pass(const Problem& problem, const TileShapes& tiles, bool is_backward, const Device& device,
                     PassEstimate& estimate) {
  const auto& rows = is_backward ? tiles.kv : tiles.query;
  const auto& columns = is_backward ? tiles.query : tiles.kv;
  estimate = {};
  for (const Kernel kernel : {Kernel::kForward, Kernel::kQueryGradient, Kernel::kKeyValueGradient}) {
    if ((kernel != Kernel::kForward) != is_backward) continue;
    const Problem kernel_problem = kernel == Kernel::kKeyValueGradient ? without_additional(problem) : problem;
    Region region{};
    NATTEN_JAX_RETURN_IF_FAILED(
        choose_region(kernel_problem, rows, columns, kernel, Coverage::kComplete, device, region));
    estimate.seconds += region.nanoseconds / 1e9;
    estimate.launches.push_back({kernel, region});
    // Check that the kernels also support parts of the layout (Coverage::kParts). A part may begin anywhere in the
    // layout, and its boxes may need more shared memory.
    const Sides part_sides(kernel_problem, kernel, Coverage::kParts);
    NATTEN_JAX_RETURN_IF_FAILED(begin_region(kernel_problem, part_sides.dimensions, rows, columns, region));
    if (!complete_region(kernel_problem, part_sides.dimensions, kernel, compiled_head_dim(problem), 1, device, region))
      return too_large();
  }
  if (is_backward && problem.additional_kv > 0) estimate.seconds += estimate_additional(problem, device) / 1e9;
  Region whole{};
  if (is_backward &&
      !choose_region(problem, rows, columns, Kernel::kWholeGradient, Coverage::kComplete, device, whole).failed() &&
      whole.nanoseconds / 1e9 <= estimate.seconds) {
    estimate = {{{Kernel::kWholeGradient, whole}}, whole.nanoseconds / 1e9};
  }
  return {};
}

}  // namespace natten_jax::small
