#include "cuda/small/ring_shape.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <vector>

#include "cuda/small/bias_table.h"
#include "cuda/small/ring_bias.h"
#include "cuda/small/ring_span.h"

namespace natten_jax::small {
namespace {

constexpr std::int64_t kSwizzle = 1024, kAlignment = 128, kLanes = 32;

/// Cost model of the work on an SM. Costs are times in nanoseconds, unless a field is described otherwise.
struct RingCosts {
  double tile;              ///< Fixed time of a tile.
  double slab;              ///< Time of a tile per slab that it sees.
  double block;             ///< Time of a tile per block that it sees.
  double waiting_exponent;  ///< The time of a tile is multiplied by (possible warps / actual warps)^waiting_exponent,
                            ///< because fewer warps hide less latency.
  double first;        ///< Fixed time of a CTA's first segment. The time to load the slabs of its first step is added.
  double next;         ///< Fixed time of each later segment.
  double waits;        ///< A later segment waits for this fraction of the time to load its first slabs. The previous
                       ///< segment hides the rest.
  double loaded_slab;  ///< Time per loaded slab, however many tiles see it: all warps have to release it.
  double slowest_exponent;  ///< `block` is multiplied by (blocks of a strip's busiest warp / average blocks of a
                            ///< warp)^slowest_exponent.
};

/// Costs with slabs that TMA loads. They were fitted to the times of 5,700 launches of 200 problems on an H100. 90% of
/// the estimates are between 16% too short and 13% too long. On 60 other problems, the chosen shapes took 1 to 5%
/// longer than the fastest shapes that were timed, depending on the kernel.
constexpr RingCosts costs_of_boxes(Kernel kernel, bool is_wide) {
  switch (kernel) {
    case Kernel::kKeyValueGradient:
      return is_wide ? RingCosts{281, 12.8, 41.1, 0.14, 9720, 2810, 0, 27.6, 0.36}
                     : RingCosts{168, 5.14, 25.8, 0.19, 10400, 3850, 0, 21.9, 0.31};
    case Kernel::kQueryGradient:
      return is_wide ? RingCosts{323, 18.5, 16.5, 0.2, 9120, 2100, 0, 54.8, 0}
                     : RingCosts{143, 22, 11.1, 0.3, 8290, 2140, 0, 111, 0};
    default:
      return is_wide ? RingCosts{234, 21.8, 12.6, 0.26, 7650, 2330, 0, 54.5, 0}
                     : RingCosts{90.6, 25.3, 7.53, 0.39, 6330, 2350, 0, 120, 0};
  }
}

/// Costs with slabs that warps copy in chunks. On an H100 that ran code for compute capability 8.0, estimates of 816
/// launches of 16 problems were off by 3 to 10%, depending on the kernel. The chosen shapes took on average 1.0 to 1.04
/// times as long as the fastest ones. With the costs of TMA loads times 1.15, the chosen shapes took up to 1.06 times
/// as long as the fastest ones.
constexpr RingCosts costs_of_chunks(Kernel kernel, bool is_wide) {
  switch (kernel) {
    case Kernel::kKeyValueGradient:
      return is_wide ? RingCosts{432, 50, 29, 0.26, 820, 820, 1, 0, 0}
                     : RingCosts{193, 11, 26, 0.27, 3600, 3600, 1, 0, 0};
    case Kernel::kQueryGradient:
      return is_wide ? RingCosts{575, 8.7, 7.5, 0.4, 930, 930, 1, 0, 0}
                     : RingCosts{213, 27.5, 13, 0.23, 1550, 1550, 1, 0, 0};
    default:
      return is_wide ? RingCosts{356, 12.7, 7.7, 0.46, 970, 970, 1, 0, 0}
                     : RingCosts{81, 31, 8.9, 0.42, 1900, 1900, 1, 0, 0};
  }
}

constexpr RingCosts costs_of(RingLoads loads, Kernel kernel, std::int64_t head_dim) {
  const bool is_wide = head_dim == 64;
  return loads == RingLoads::kBoxes ? costs_of_boxes(kernel, is_wide) : costs_of_chunks(kernel, is_wide);
}

/// Returns the factor by which biases increase the time of steps, as measured on an H100.
double bias_factor(const Problem& problem, Kernel kernel) {
  const bool is_wide = problem.head_dim == 64;
  const auto by_width = [&](double wide, double narrow) { return is_wide ? wide : narrow; };
  if (problem.has_relative_bias) return kernel == Kernel::kForward ? by_width(1.09, 1.18) : by_width(1.08, 1.14);
  if (!problem.has_key_bias) return 1;
  if (kernel == Kernel::kForward) return by_width(1.09, 1.14);
  return by_width(1.07, 1.1);
}

/// True if there are compiled kernels for the problem's biases. The number of table entries has the same limit as in
/// the other kernels for small windows.
bool is_compiled_with_biases(const Problem& problem, RingLoads loads) {
  if (!problem.has_key_bias && !problem.has_relative_bias) return true;
  if (loads != RingLoads::kBoxes) return false;
  return !problem.has_relative_bias || offset_table(problem.axes).entries <= kMostBiasEntries;
}

/// Time of an almost empty launch, in nanoseconds, and bytes of slabs that a CTA loads per nanosecond.
constexpr double kLaunch = 3000, kBytes = 50;

/// Factor on the estimates of rings with chunk loads. A ring is then chosen only if it is faster by more than the error
/// of the estimates. There is an error because the estimates of regions were fitted to code that loads boxes.
constexpr double kClearly = 1.05;

/// Factor on the estimates of regions for key and value gradients. On an H100, rings were faster for 42 of 43 problems,
/// and a wrong choice of a ring costs less time than a wrong choice of a region.
constexpr double kKeyGradientFactor = 1.15;

/// Factor on the estimates of regions for problems with biases that rings also support. On an H100, forward passes of
/// four problems with regions took 1.12 to 1.26 times as long as estimated.
constexpr double kBiasedRegionFactor = 1.15;

/// Minimum number of keys in a window. With fewer keys, the fixed work per tile dominates. For example, NAT's first
/// stage, with windows of 7 x 7 keys, took 60 microseconds with a ring and 52 with regions on an H100.
constexpr std::int64_t kLeastKeys = 100;

/// Maximum number of keys in a window for which regions were timed against rings. For windows of 33 x 33 keys, costs
/// that were fitted to smaller windows gave shorter estimates than the cost model of the kernels for large windows.
constexpr std::int64_t kMostKeysTimed = 400;

/// Maximum extent of a dimension. There is a limit because all strips in a dimension are enumerated.
constexpr std::int64_t kLongestDimension = std::int64_t{1} << 16;

/// Returns the number of keys in a complete window.
std::int64_t keys_of_window(const Problem& problem) {
  std::int64_t keys = 1;
  for (const Axis& axis : problem.axes) keys *= std::min(axis.window.kernel_size, kLongestDimension);
  return keys;
}

/// True if windows extend along at most one dimension. Such problems do not use rings, and rings were not timed for
/// them. They also do not use the costs that were fitted to regions and rings in two and three dimensions. With the
/// regions that those costs chose, the gradients of causal windows of 128 keys took 4.6% longer than with the regions
/// that the other costs chose.
bool is_sequence(const Problem& problem) {
  const auto has_window = [](const Axis& axis) { return axis.window.kernel_size > 1; };
  return std::count_if(std::begin(problem.axes), std::end(problem.axes), has_window) <= 1;
}

/// Numbers of blocks of a slab that a warp sees:
/// - average: average over all warps.
/// - most: average over the warps of the busiest strip.
/// - slowest: number for the busiest warp of a strip, averaged over all strips.
struct BlocksOfSlab {
  double average, most, slowest;
};

/// Average numbers of slabs per step:
/// - visible: slabs that the step's tiles see.
/// - coming: slabs that the step's tiles see and that no earlier step of the strip sees.
struct SlabsOfStep {
  double visible, coming;
};

/// Chooses the number of segments per strip for which the estimated launch time is shortest.
void choose_segments(const Problem& problem, Kernel kernel, const Device& device, SlabsOfStep slabs,
                     BlocksOfSlab blocks, std::int64_t first_bytes, RingShape& shape) {
  const RingCosts costs = costs_of(shape.loads, kernel, problem.head_dim);
  const std::int64_t strips = problem.batch * problem.heads * shape.strips[0] * shape.strips[1],
                     adjacent = std::int64_t{shape.adjacent[0]} * shape.adjacent[1];
  // Number of warp sets (RingShape::warp_sets) that work at the same time. These are the warp sets for which the ring
  // can hold all slabs, and one warp set for which it holds only some of them.
  const double held_sets = 2 + (shape.slots - slabs.visible) * shape.thick / shape.rows[2],
               sets = std::clamp<double>(held_sets, 1, shape.warp_sets());
  const double warps = static_cast<double>(adjacent) * sets,
               waiting = most_ring_warps(RingLoads::kBoxes, narrow(problem.head_dim)) / warps;
  const double longer = std::pow(waiting, costs.waiting_exponent) * bias_factor(problem, kernel),
               slower = std::pow(blocks.slowest / blocks.average, costs.slowest_exponent);
  const auto step_of = [&](double blocks_of_slab) {
    const double tile = costs.tile + (costs.slab + costs.block * slower * blocks_of_slab) * slabs.visible;
    return static_cast<double>(adjacent) * tile * longer + slabs.coming * costs.loaded_slab;
  };
  const double loads = static_cast<double>(first_bytes) / kBytes, first = costs.first + loads,
               next = costs.next + costs.waits * loads;
  shape.nanoseconds = std::numeric_limits<double>::max();
  for (std::int64_t segments = 1; segments <= shape.steps; ++segments) {
    const std::int64_t steps_per_segment = divide_up(shape.steps, segments);
    if (steps_per_segment > most_segment_steps(shape.loads) || divide_up(shape.steps, steps_per_segment) != segments)
      continue;
    const auto rounds = static_cast<double>(divide_up(strips * segments, device.multiprocessors));
    // The strip with the most work may be in the last round.
    const double steps =
        static_cast<double>(steps_per_segment) * ((rounds - 1) * step_of(blocks.average) + step_of(blocks.most));
    const double nanoseconds =
        (kLaunch + steps + first + (rounds - 1) * next) * (shape.loads == RingLoads::kChunks ? kClearly : 1);
    if (nanoseconds >= shape.nanoseconds) continue;
    shape.nanoseconds = nanoseconds;
    shape.segments = narrow(segments);
    shape.segment_steps = narrow(steps_per_segment);
  }
}

/// Computes the remaining fields of a shape from its tiles and from the arrangement of its warps. Returns false if the
/// shape cannot be launched.
bool complete(const Problem& problem, Kernel kernel, const Device& device, const VisibleBlocks& by_groups,
              const VisibleBlocks& by_inner, const VisibleSlabs& slabs, RingShape& shape) {
  const bool rows_are_keys = kernel == Kernel::kKeyValueGradient;
  const auto length = [&](int i) { return problem.axes[shape.dimension[i]].kv.extent; };
  for (int i = 0; i < 2; ++i) {
    shape.strips[i] = narrow(divide_up(length(i), std::int64_t{shape.rows[i]} * shape.adjacent[i]));
  }
  const std::int64_t strips = std::int64_t{shape.strips[0]} * shape.strips[1],
                     adjacent = std::int64_t{shape.adjacent[0]} * shape.adjacent[1], tiles = strips * adjacent;
  std::int64_t groups = by_groups.strip_extent, inner = by_inner.strip_extent,
               blocks = by_groups.total * by_inner.total,
               most_blocks = by_groups.max_per_strip * by_inner.max_per_strip,
               slowest_blocks = by_groups.slowest_total * by_inner.slowest_total;
  shape.blocks = narrow(by_groups.max_per_warp * by_inner.max_per_warp);
  if (!rows_are_keys) {
    const auto* const form = std::find_if(std::begin(kRingForms), std::end(kRingForms), [&](const RingForm& candidate) {
      return by_groups.max_per_warp <= candidate.groups && by_inner.max_per_warp <= candidate.inner;
    });
    if (form == std::end(kRingForms)) return false;
    shape.form = narrow(form - std::begin(kRingForms));
    groups = std::max<std::int64_t>(groups, form->groups);
    inner = std::max<std::int64_t>(inner, form->inner);
    blocks = tiles * form->blocks();
    most_blocks = adjacent * form->blocks();
    slowest_blocks = strips * form->blocks();
  }
  shape.groups = narrow(groups);
  shape.group_blocks = narrow(inner);
  shape.inner = narrow(shape.thick > 1 ? 1 : inner * kBlockKeys / shape.wide);
  const std::int64_t row_bytes = 2 * problem.head_dim, keys_of_slab = groups * inner * kBlockKeys;
  shape.array_bytes = narrow(keys_of_slab * row_bytes);
  shape.tile_bytes = narrow(kRows * row_bytes);
  const std::int64_t tile_bytes = std::int64_t{shape.tile_bytes} * shape.warps * ring_tile_arrays(kernel);
  const std::int64_t window_bytes = divide_up(length(2) * 4, kAlignment) * kAlignment;
  if (problem.has_key_bias && !rows_are_keys && keys_of_slab > kMostBiasedKeys) return false;
  const std::int64_t key_bias_bytes = problem.has_key_bias ? kKeyBiasBytes / kBlockKeys : 0,
                     statistics_bytes = keys_of_slab * (rows_are_keys ? kStatisticsBytes : key_bias_bytes);
  const std::int64_t mask_bytes = rows_are_keys ? std::int64_t{shape.warps} * shape.blocks * kLanes : 0;
  const std::int64_t bias_bytes = shape.bias_line > 0 ? RingBias(problem.axes, shape, kernel).bytes : 0;
  const std::int64_t slots = std::min<std::int64_t>(
      (device.shared_memory - tile_bytes - window_bytes - mask_bytes - kRingBarrierBytes - bias_bytes) /
          (2 * shape.array_bytes + statistics_bytes),
      kMostRingSlots);
  // Minimum number of slabs in the ring. If rows are queries, the ring has to hold the slabs of a step, and the slabs
  // that the next step sees in addition. If rows are keys, it has to hold the slabs that a step shares with the next
  // step, and one more slab. More queries see the keys at an edge of the layout, so that steps there see more slabs.
  // The warps of these steps may then wait for slabs that are not in the ring yet.
  const std::int64_t least_slots = rows_are_keys ? slabs.held + 1 : slabs.most + divide_up(shape.rows[2], shape.thick);
  if (slots < least_slots || shape.array_bytes % kSwizzle != 0) return false;
  shape.slots = narrow(slots);
  shape.tiles = 2 * shape.array_bytes * shape.slots;
  shape.windows = narrow(shape.tiles + tile_bytes);
  shape.statistics = narrow(shape.windows + window_bytes);
  shape.masks = narrow(shape.statistics + statistics_bytes * slots);
  shape.barriers = narrow(shape.masks + mask_bytes);
  shape.bytes = narrow(shape.barriers + kRingBarrierBytes + bias_bytes);
  const auto quotient = [](std::int64_t a, std::int64_t b) { return static_cast<double>(a) / static_cast<double>(b); };
  choose_segments(problem, kernel, device, {quotient(slabs.all, shape.steps), quotient(slabs.count, shape.steps)},
                  {quotient(blocks, tiles), quotient(most_blocks, adjacent), quotient(slowest_blocks, strips)},
                  slabs.most * 2 * shape.array_bytes, shape);
  shape.pairs = slabs.all * blocks * kBlockKeys * kRows;
  shape.keys = 0;
  const std::int64_t segment_rows = std::int64_t{shape.segment_steps} * slabs.depth;
  for (std::int64_t row = 0; row < length(2); row += segment_rows) {
    const auto [first, end] = slabs.slab_range(row, segment_rows);
    shape.keys += strips * (end - first) * keys_of_slab;
  }
  return problem.batch * problem.heads * strips * shape.segments < std::int64_t{1} << 31;
}

/// Completes a shape, given its tiles, with every arrangement of its warps. Replaces `best` if a completed shape is
/// faster.
void take_fastest(const Problem& problem, Kernel kernel, const Device& device, RingShape shape, RingShape& best) {
  const bool rows_are_keys = kernel == Kernel::kKeyValueGradient, is_thick = shape.thick > 1;
  const Span across{problem.axes[shape.dimension[0]], rows_are_keys},
      inside{problem.axes[shape.dimension[1]], rows_are_keys}, along{problem.axes[shape.dimension[2]], rows_are_keys};
  // A block extends in dimensions 0 and 1 of the shape. In thick slabs, it extends in dimensions 0 and 2, and dimension
  // 1 must have a single token.
  if ((is_thick && inside.length() > 1) || along.length() > kLongestStrip) return;
  const std::int64_t high = is_thick ? 1 : kBlockKeys / shape.wide;
  const VisibleSlabs slabs(along, shape.rows[2], shape.thick);
  shape.thick_shift = shape.thick == 8 ? 3 : shape.thick == 4 ? 2 : 0;
  shape.phase[0] = across.phase(shape.rows[0], shape.wide);
  shape.phase[1] = is_thick ? 0 : inside.phase(shape.rows[1], high);
  shape.phase[2] = slabs.phase;
  shape.steps = narrow(divide_up(along.length(), shape.rows[2]));
  shape.bias_line = problem.has_relative_bias ? ring_bias_line(problem, shape) : 0;
  const int most = most_ring_warps(shape.loads, narrow(problem.head_dim));
  std::vector<VisibleBlocks> by_inner;
  for (int b = 1; b <= most; ++b) by_inner.emplace_back(inside, shape.rows[1], b, high, shape.phase[1]);
  for (int a = 1; a <= most; ++a) {
    const VisibleBlocks by_groups(across, shape.rows[0], a, shape.wide, shape.phase[0]);
    for (int b = 1; a * b <= most; ++b) {
      shape.adjacent[0] = a;
      shape.adjacent[1] = b;
      shape.warps = most / (a * b) * (a * b);
      if (!complete(problem, kernel, device, by_groups, by_inner[b - 1], slabs, shape)) continue;
      if (best.warps == 0 || shape.nanoseconds < best.nanoseconds) best = shape;
    }
  }
}

}  // namespace

bool can_have_ring(const Problem& problem, Coverage coverage) {
  if (coverage != Coverage::kComplete || problem.additional_kv > 0) return false;
  if (problem.head_dim != problem.head_dim_v || (problem.head_dim != 32 && problem.head_dim != 64)) return false;
  if (keys_of_window(problem) < kLeastKeys || is_sequence(problem)) return false;
  return std::all_of(std::begin(problem.axes), std::end(problem.axes), [](const Axis& axis) {
    const std::int64_t extent = axis.kv.extent;
    const bool is_complete =
        axis.query.extent == extent && axis.query.local_extent == extent && axis.kv.local_extent == extent;
    return is_complete && extent <= kLongestDimension && axis.window.dilation == 1 && axis.window.ends != Ends::kWrap;
  });
}

bool is_timed_against_rings(const Problem& problem, Coverage coverage) {
  // Regions were not timed against rings with key biases.
  return can_have_ring(problem, coverage) && !problem.has_key_bias && keys_of_window(problem) <= kMostKeysTimed;
}

bool can_have_gradient_ring(const Problem& problem, Coverage coverage) {
  return problem.heads == problem.heads_kv && can_have_ring(problem, coverage);
}

RingShape choose_ring(const Problem& problem, const std::int64_t (&rows)[kRank], const std::int64_t (&columns)[kRank],
                      Kernel kernel, Coverage coverage, RingLoads loads, const Device& device) {
  RingShape best{};
  // The kernel of query gradients would also have to compute the gradient of the relative bias, which rings do not
  // support.
  if (problem.has_relative_bias && kernel == Kernel::kQueryGradient) return best;
  if (!can_have_ring(problem, coverage) || !is_compiled_with_biases(problem, loads)) return best;
  int dimension[kRank] = {0, 1, 2};
  do {
    RingShape shape{};
    shape.loads = loads;
    for (int i = 0; i < kRank; ++i) {
      shape.dimension[i] = dimension[i];
      shape.rows[i] = narrow(rows[dimension[i]]);
    }
    const std::int64_t wide = columns[dimension[0]], high = columns[dimension[1]], deep = columns[dimension[2]];
    if (wide < 2 || wide > 4 || (deep > 1 && high > 1)) continue;
    shape.wide = narrow(wide);
    shape.thick = deep > 1 ? narrow(kBlockKeys / wide) : 1;
    take_fastest(problem, kernel, device, shape, best);
  } while (std::next_permutation(std::begin(dimension), std::end(dimension)));
  return best;
}

RingShape choose_gradient_ring(const Problem& problem, Coverage coverage, RingLoads loads, const Device& device) {
  RingShape best{};
  if (!can_have_gradient_ring(problem, coverage) || !is_compiled_with_biases(problem, loads)) return best;
  int dimension[kRank] = {0, 1, 2};
  do {
    const auto length = [&](int i) { return problem.axes[dimension[i]].kv.extent; };
    RingShape shape{};
    shape.loads = loads;
    std::copy(std::begin(dimension), std::end(dimension), std::begin(shape.dimension));
    for (int across = 1; across <= kRows; across *= 2) {
      for (int inside = 1; across * inside <= kRows; inside *= 2) {
        shape.rows[0] = across;
        shape.rows[1] = inside;
        shape.rows[2] = narrow(kRows) / across / inside;
        const bool is_too_long = std::any_of(std::begin(shape.rows), std::end(shape.rows), [&](const int& rows) {
          return rows > 1 && length(narrow(&rows - shape.rows)) < rows;
        });
        if (is_too_long) continue;
        for (const int wide : {2, 4}) {
          if (wide > length(0)) continue;
          shape.wide = wide;
          for (const int thick : {1, narrow(kBlockKeys) / wide}) {
            shape.thick = thick;
            take_fastest(problem, Kernel::kKeyValueGradient, device, shape, best);
          }
        }
      }
    }
  } while (std::next_permutation(std::begin(dimension), std::end(dimension)));
  return best;
}

double nanoseconds_against_rings(const Region& region, const Problem& problem, Kernel kernel, Coverage coverage) {
  if (kernel == Kernel::kKeyValueGradient) {
    return region.nanoseconds * (can_have_gradient_ring(problem, coverage) ? kKeyGradientFactor : 1);
  }
  const bool has_biases = problem.has_key_bias || (problem.has_relative_bias && kernel == Kernel::kForward);
  return region.nanoseconds * (has_biases && can_have_ring(problem, coverage) ? kBiasedRegionFactor : 1);
}

RingShape choose_faster_ring(const Region& region, const Problem& problem, const std::int64_t (&rows)[kRank],
                             const std::int64_t (&columns)[kRank], Kernel kernel, Coverage coverage, RingLoads loads,
                             const Device& device) {
  const RingShape ring = choose_ring(problem, rows, columns, kernel, coverage, loads, device);
  const double region_nanoseconds = nanoseconds_against_rings(region, problem, kernel, coverage);
  return ring.warps > 0 && ring.nanoseconds < region_nanoseconds ? ring : RingShape{};
}

}  // namespace natten_jax::small
