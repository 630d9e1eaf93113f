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

/// Cost model of the work on an SM: times in nanoseconds, and exponents of slowdowns.
struct RingCosts {
  double tile;        ///< Fixed time per tile,
  double slab;        ///< per slab that the tile sees,
  double block;       ///< and per block of that slab.
  double of_waiting;  ///< Exponent of the ratio of possible to actual warps: fewer warps hide less latency.
  double first;       ///< The first segment, except for loading the slabs that its first step waits for,
  double next;        ///< and every later segment.
  double waits;       ///< Fraction of its first slabs that a later segment waits for; the rest is loaded meanwhile.
  double of_strip;    ///< A loaded slab, independent of its readers: all warps have to release it.
  double of_slowest;  ///< Exponent of the ratio of the maximum blocks per warp of a strip to the average.
};

/// TMA loads: fitted to times of 5,700 launches of 200 problems on an H100. Nine in ten estimates are between 16% too
/// short and 13% too long. On 60 other problems, the chosen shapes took 1 to 5% longer than the best timed ones,
/// depending on the kernel.
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

/// Chunk loads: over 816 launches of 16 problems, estimates are off by 3 to 10%, depending on the kernel, on an H100
/// that ran code for compute capability 8.0. The chosen shapes took on average 1.0 to 1.04 times as long as the fastest
/// ones; with the costs of boxes times 1.15, up to 1.06 times.
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

/// Returns the slowdown of steps by biases, measured on an H100.
double of_biases(const Problem& problem, Kernel kernel) {
  const bool is_wide = problem.head_dim == 64;
  const auto by_width = [&](double wide, double narrow) { return is_wide ? wide : narrow; };
  if (problem.has_relative_bias) return kernel == Kernel::kForward ? by_width(1.09, 1.18) : by_width(1.08, 1.14);
  if (!problem.has_key_bias) return 1;
  if (kernel == Kernel::kForward) return by_width(1.09, 1.14);
  return by_width(1.07, 1.1);
}

/// True if the kernels are compiled with the problem's biases. The kernels for small windows do not support larger
/// tables, whose shared memory would not be counted.
bool is_compiled_with_biases(const Problem& problem, RingLoads loads) {
  if (!problem.has_key_bias && !problem.has_relative_bias) return true;
  if (loads != RingLoads::kBoxes) return false;
  return !problem.has_relative_bias || offset_table(problem.axes).entries <= kMostBiasEntries;
}

/// Nanoseconds of an almost empty launch, and bytes of slabs loaded per nanosecond.
constexpr double kLaunch = 3000, kBytes = 50;

/// Factor on estimates of rings with chunk loads: a ring is chosen only if it is faster by more than the uncertainty,
/// because the estimates of regions were fitted to code with boxes.
constexpr double kClearly = 1.05;

/// Factor on the estimate of key and value gradients with regions: rings were faster for 42 of 43 problems on an H100,
/// and a wrong choice of a ring costs less time than a wrong choice of a region.
constexpr double kOfKeyGradients = 1.15;

/// Factor on the estimate of regions with biases, if a ring supports them: forward passes of four problems on an H100
/// took 1.12 to 1.26 times as long as estimated.
constexpr double kOfBiasedRegions = 1.15;

/// The smallest windows, in keys. With fewer keys, the fixed work per tile dominates: with 7 x 7, NAT's first stage
/// took an H100 60 microseconds with a ring, and 52 with regions.
constexpr std::int64_t kLeastKeys = 100;

/// The largest windows, in keys, for which regions were timed against rings. For 33 x 33, costs fitted to smaller
/// windows gave estimates below the estimates of kernels for large windows.
constexpr std::int64_t kMostKeysTimed = 400;

/// Maximum extent of a dimension, because strips across it are enumerated.
constexpr std::int64_t kLongestDimension = std::int64_t{1} << 16;

/// Returns the keys of a complete window.
std::int64_t keys_of_window(const Problem& problem) {
  std::int64_t keys = 1;
  for (const Axis& axis : problem.axes) keys *= std::min(axis.window.kernel_size, kLongestDimension);
  return keys;
}

/// True if windows extend along at most one dimension. Costs fitted to regions and rings in two and three dimensions
/// chose regions for causal windows of 128 keys whose gradients took 4.6% longer, and rings were not timed for them.
bool is_sequence(const Problem& problem) {
  const auto has_window = [](const Axis& axis) { return axis.window.kernel_size > 1; };
  return std::count_if(std::begin(problem.axes), std::end(problem.axes), has_window) <= 1;
}

/// Blocks of a slab that a warp sees: the average over all warps, over the warps of the busiest strip, and over the
/// busiest warp of every strip.
struct BlocksOfSlab {
  double average, most, of_slowest;
};

/// Average slabs per step: seen by its tiles, and newly loaded.
struct SlabsOfStep {
  double seen, coming;
};

/// Divides strips into segments, and estimates the launch time.
void choose_segments(const Problem& problem, Kernel kernel, const Device& device, SlabsOfStep slabs,
                     BlocksOfSlab blocks, std::int64_t first_bytes, RingShape& shape) {
  const RingCosts costs = costs_of(shape.loads, kernel, problem.head_dim);
  const std::int64_t strips = problem.batch * problem.heads * shape.strips[0] * shape.strips[1],
                     beside = std::int64_t{shape.beside[0]} * shape.beside[1];
  // Turns (groups of adjacent warps) that run concurrently: as many as the ring has slabs for, plus a partial one.
  const double held_turns = 2 + (shape.slots - slabs.seen) * shape.thick / shape.rows[2],
               turns = std::clamp<double>(held_turns, 1, shape.turns());
  const double warps = static_cast<double>(beside) * turns,
               waiting = most_ring_warps(RingLoads::kBoxes, narrow(problem.head_dim)) / warps;
  const double longer = std::pow(waiting, costs.of_waiting) * of_biases(problem, kernel),
               slower = std::pow(blocks.of_slowest / blocks.average, costs.of_slowest);
  const auto step_of = [&](double blocks_of_slab) {
    const double tile = costs.tile + (costs.slab + costs.block * slower * blocks_of_slab) * slabs.seen;
    return static_cast<double>(beside) * tile * longer + slabs.coming * costs.of_strip;
  };
  const double loads = static_cast<double>(first_bytes) / kBytes, first = costs.first + loads,
               next = costs.next + costs.waits * loads;
  shape.nanoseconds = std::numeric_limits<double>::max();
  for (std::int64_t segments = 1; segments <= shape.steps; ++segments) {
    const std::int64_t of_segment = divide_up(shape.steps, segments);
    if (of_segment > most_segment_steps(shape.loads) || divide_up(shape.steps, of_segment) != segments) continue;
    const auto rounds = static_cast<double>(divide_up(strips * segments, device.multiprocessors));
    // The slowest strip may be in the last round.
    const double steps =
        static_cast<double>(of_segment) * ((rounds - 1) * step_of(blocks.average) + step_of(blocks.most));
    const double nanoseconds =
        (kLaunch + steps + first + (rounds - 1) * next) * (shape.loads == RingLoads::kChunks ? kClearly : 1);
    if (nanoseconds >= shape.nanoseconds) continue;
    shape.nanoseconds = nanoseconds;
    shape.segments = narrow(segments);
    shape.segment_steps = narrow(of_segment);
  }
}

/// Derives the rest of a shape from its tiles and the arrangement of its warps; false if it cannot be launched.
bool complete(const Problem& problem, Kernel kernel, const Device& device, const SeenBlocks& by_groups,
              const SeenBlocks& by_inner, const SeenSlabs& slabs, RingShape& shape) {
  const bool rows_are_keys = kernel == Kernel::kKeyValueGradient;
  const auto length = [&](int i) { return problem.axes[shape.dimension[i]].kv.extent; };
  for (int i = 0; i < 2; ++i) {
    shape.strips[i] = narrow(divide_up(length(i), std::int64_t{shape.rows[i]} * shape.beside[i]));
  }
  const std::int64_t strips = std::int64_t{shape.strips[0]} * shape.strips[1],
                     beside = std::int64_t{shape.beside[0]} * shape.beside[1], tiles = strips * beside;
  std::int64_t groups = by_groups.of_strip, inner = by_inner.of_strip, blocks = by_groups.of_all * by_inner.of_all,
               most_blocks = by_groups.of_warps * by_inner.of_warps,
               slowest_blocks = by_groups.of_slowest * by_inner.of_slowest;
  shape.blocks = narrow(by_groups.of_warp * by_inner.of_warp);
  if (!rows_are_keys) {
    const auto* const form = std::find_if(std::begin(kRingForms), std::end(kRingForms), [&](const RingForm& each) {
      return by_groups.of_warp <= each.groups && by_inner.of_warp <= each.inner;
    });
    if (form == std::end(kRingForms)) return false;
    shape.form = narrow(form - std::begin(kRingForms));
    groups = std::max<std::int64_t>(groups, form->groups);
    inner = std::max<std::int64_t>(inner, form->inner);
    blocks = tiles * form->blocks();
    most_blocks = beside * form->blocks();
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
  const std::int64_t of_key = problem.has_key_bias ? kKeyBiasBytes / kBlockKeys : 0,
                     statistics_bytes = keys_of_slab * (rows_are_keys ? kStatisticsBytes : of_key);
  const std::int64_t mask_bytes = rows_are_keys ? std::int64_t{shape.warps} * shape.blocks * kLanes : 0;
  const std::int64_t bias_bytes = shape.bias_line > 0 ? RingBias(problem.axes, shape, kernel).bytes : 0;
  const std::int64_t slots = std::min<std::int64_t>(
      (device.shared_memory - tile_bytes - window_bytes - mask_bytes - kRingBarrierBytes - bias_bytes) /
          (2 * shape.array_bytes + statistics_bytes),
      kMostRingSlots);
  // Slabs of a step, and the slabs that the next step waits for. More queries see the keys next to a border: there,
  // warps may wait for slabs that are not in the ring yet.
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
                  {quotient(blocks, tiles), quotient(most_blocks, beside), quotient(slowest_blocks, strips)},
                  slabs.most * 2 * shape.array_bytes, shape);
  shape.pairs = slabs.all * blocks * kBlockKeys * kRows;
  shape.keys = 0;
  const std::int64_t of_segment = std::int64_t{shape.segment_steps} * slabs.depth;
  for (std::int64_t row = 0; row < length(2); row += of_segment) {
    const auto [first, end] = slabs.of_rows(row, of_segment);
    shape.keys += strips * (end - first) * keys_of_slab;
  }
  return problem.batch * problem.heads * strips * shape.segments < std::int64_t{1} << 31;
}

/// Completes a shape with every arrangement of its warps, given its tiles; updates the fastest one.
void take_fastest(const Problem& problem, Kernel kernel, const Device& device, RingShape shape, RingShape& best) {
  const bool rows_are_keys = kernel == Kernel::kKeyValueGradient, is_thick = shape.thick > 1;
  const Span across{problem.axes[shape.dimension[0]], rows_are_keys},
      inside{problem.axes[shape.dimension[1]], rows_are_keys}, along{problem.axes[shape.dimension[2]], rows_are_keys};
  // A block extends along two dimensions: both of the slab's, or the first one and the strip's.
  if ((is_thick && inside.length() > 1) || along.length() > kLongestStrip) return;
  const std::int64_t high = is_thick ? 1 : kBlockKeys / shape.wide;
  const SeenSlabs slabs(along, shape.rows[2], shape.thick);
  shape.thick_shift = shape.thick == 8 ? 3 : shape.thick == 4 ? 2 : 0;
  shape.phase[0] = across.phase(shape.rows[0], shape.wide);
  shape.phase[1] = is_thick ? 0 : inside.phase(shape.rows[1], high);
  shape.phase[2] = slabs.phase;
  shape.steps = narrow(divide_up(along.length(), shape.rows[2]));
  shape.bias_line = problem.has_relative_bias ? ring_bias_line(problem, shape) : 0;
  const int most = most_ring_warps(shape.loads, narrow(problem.head_dim));
  std::vector<SeenBlocks> by_inner;
  for (int b = 1; b <= most; ++b) by_inner.emplace_back(inside, shape.rows[1], b, high, shape.phase[1]);
  for (int a = 1; a <= most; ++a) {
    const SeenBlocks by_groups(across, shape.rows[0], a, shape.wide, shape.phase[0]);
    for (int b = 1; a * b <= most; ++b) {
      shape.beside[0] = a;
      shape.beside[1] = b;
      shape.warps = most / (a * b) * (a * b);
      if (!complete(problem, kernel, device, by_groups, by_inner[b - 1], slabs, shape)) continue;
      if (best.warps == 0 || shape.nanoseconds < best.nanoseconds) best = shape;
    }
  }
}

}  // namespace

bool can_have_ring(const Problem& problem, Places places) {
  if (places != Places::kComplete || problem.additional_kv > 0) return false;
  if (problem.head_dim != problem.head_dim_v || (problem.head_dim != 32 && problem.head_dim != 64)) return false;
  if (keys_of_window(problem) < kLeastKeys || is_sequence(problem)) return false;
  return std::all_of(std::begin(problem.axes), std::end(problem.axes), [](const Axis& axis) {
    const std::int64_t extent = axis.kv.extent;
    const bool is_complete =
        axis.query.extent == extent && axis.query.local_extent == extent && axis.kv.local_extent == extent;
    return is_complete && extent <= kLongestDimension && axis.window.dilation == 1 && axis.window.ends != Ends::kWrap;
  });
}

bool is_timed_beside_rings(const Problem& problem, Places places) {
  // Regions were not timed against rings with key biases.
  return can_have_ring(problem, places) && !problem.has_key_bias && keys_of_window(problem) <= kMostKeysTimed;
}

bool can_have_gradient_ring(const Problem& problem, Places places) {
  return problem.heads == problem.heads_kv && can_have_ring(problem, places);
}

RingShape choose_ring(const Problem& problem, const std::int64_t (&rows)[kRank], const std::int64_t (&columns)[kRank],
                      Kernel kernel, Places places, RingLoads loads, const Device& device) {
  RingShape best{};
  // Query gradients with a relative bias also compute the table's gradient, which rings do not support.
  if (problem.has_relative_bias && kernel == Kernel::kQueryGradient) return best;
  if (!can_have_ring(problem, places) || !is_compiled_with_biases(problem, loads)) return best;
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

RingShape choose_gradient_ring(const Problem& problem, Places places, RingLoads loads, const Device& device) {
  RingShape best{};
  if (!can_have_gradient_ring(problem, places) || !is_compiled_with_biases(problem, loads)) return best;
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

double nanoseconds_beside_rings(const Region& region, const Problem& problem, Kernel kernel, Places places) {
  if (kernel == Kernel::kKeyValueGradient) {
    return region.nanoseconds * (can_have_gradient_ring(problem, places) ? kOfKeyGradients : 1);
  }
  const bool has_biases = problem.has_key_bias || (problem.has_relative_bias && kernel == Kernel::kForward);
  return region.nanoseconds * (has_biases && can_have_ring(problem, places) ? kOfBiasedRegions : 1);
}

RingShape choose_ring_before(const Region& region, const Problem& problem, const std::int64_t (&rows)[kRank],
                             const std::int64_t (&columns)[kRank], Kernel kernel, Places places, RingLoads loads,
                             const Device& device) {
  const RingShape ring = choose_ring(problem, rows, columns, kernel, places, loads, device);
  const double of_region = nanoseconds_beside_rings(region, problem, kernel, places);
  return ring.warps > 0 && ring.nanoseconds < of_region ? ring : RingShape{};
}

}  // namespace natten_jax::small
