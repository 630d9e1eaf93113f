#include "cuda/small/region_time.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace natten_jax::small {
namespace {

/// Maximum number of chunks into which the items of a region are divided. This is the limit of gridDim.y.
constexpr std::int64_t kMostChunks = 65535;

/// Maximum number of rounds. In each round, CTAs fill all SMs once. Every CTA computes a plan, and with more rounds
/// these plans would take too much time.
constexpr int kMostRounds = 4;

/// Cost model of the work on an SM. Costs are times in nanoseconds, unless a field is described otherwise.
struct Costs {
  double tile;       ///< Fixed time of a tile, for heads of 32.
  double pair;       ///< Time of a tile per pair of column groups, for heads of 32.
  double column;     ///< Time to load or store a token of two arrays, for heads of 32.
  double exposed;    ///< Relative extra time of `column` and `item` on an SM with a single CTA that has a single stage.
  double waiting;    ///< Factor on the time of a tile if its warp is the only one on the SM.
  double uneven;     ///< Weight of the imbalance of warps between the four partitions of an SM.
  double staged;     ///< Effect of a second stage on the overlap of loads, relative to that of one more CTA.
  double plan;       ///< Time of a plan, per warp of the CTA.
  double factor_64;  ///< Factor on `tile` and `pair` for heads of 64.
  double factor_128;  ///< Factor on `tile` and `pair` for heads of 128.
  double item;        ///< Fixed time of an item of a CTA.
  double stage;       ///< Time to start a second stage, per plan.
};

/// Time of an almost empty launch, in nanoseconds.
constexpr double kLaunch = 2300;

/// Returns the costs of a kernel. They were fitted to the times of 9,300 regions of 26 problems on an H200. For the
/// best region of each problem, the estimated time is off by at most 30%, and for most problems by at most 10%. The
/// chosen regions took 2% longer than the best ones on average, and at most 13% longer. The costs of the forward kernel
/// with boxes were fitted again later. With the new costs, causal windows of 128 keys take 93 instead of 99
/// microseconds.
constexpr Costs costs_of(Kernel kernel, bool has_boxes) {
  switch (kernel) {
    case Kernel::kForward:
      return has_boxes ? Costs{55.5, 16.3, 0.0343, 15, 5.71, 0.171, 11.6, 174, 1.41, 1.99, 32.5, 494}
                       : Costs{86, 13.1, 0.0545, 15, 8.38, 0.658, 12, 204, 1.32, 1.97, 62.4, 474};
    case Kernel::kQueryGradient:
      return has_boxes ? Costs{107, 18.2, 0.0238, 15, 4.98, 0.214, 0.765, 306, 1.4, 1.97, 23.2, 268}
                       : Costs{134, 17.7, 0.0692, 4.22, 6.42, 0.255, 1.25, 458, 1.7, 2.9, 41.5, 170};
    case Kernel::kKeyValueGradient:
      return has_boxes ? Costs{42.4, 22.4, 0.0279, 15, 1.8, 0.759, 0.189, 235, 1.4, 1.97, 125, 311}
                       : Costs{133, 16.6, 0.132, 15, 5.3, 0.134, 0.516, 121, 1.4, 1.97, 93.4, 1260};
    case Kernel::kWholeGradient:
      return {240, 48, 0.0201, 0.95, 0.5, 0.163, 12, 150, 2, 4, 223, 845};
  }
  return {};
}

/// Like costs_of, for problems for which rings may be faster: windows of 100 to 400 keys (is_timed_against_rings).
/// These costs were fitted to the times of 3,000 regions of 200 problems on an H100. The estimates with costs_of were
/// up to a quarter too short, especially for launches with few CTAs.
constexpr Costs costs_against_rings(Kernel kernel, bool has_boxes) {
  switch (kernel) {
    case Kernel::kForward:
      return has_boxes ? Costs{97.1, 16, 0.0579, 15, 3.1, 0.413, 11.6, 174, 1.32, 1.99, 35.1, 494}
                       : Costs{212, 13.3, 0.0511, 15, 6.17, 0.653, 12, 204, 1.21, 1.97, 43.6, 474};
    case Kernel::kQueryGradient:
      return has_boxes ? Costs{186, 19.5, 0.0328, 15, 3.24, 0.353, 0.765, 306, 1.41, 1.97, 24.6, 268}
                       : Costs{280, 18.8, 0.0741, 4.22, 5.67, 0.429, 1.25, 458, 1.36, 2.9, 41.9, 170};
    case Kernel::kKeyValueGradient:
      return has_boxes ? Costs{39.4, 24.8, 0.0299, 15, 1.18, 0.378, 0.189, 235, 1.35, 1.97, 222, 311}
                       : Costs{136, 29.3, 0.102, 15, 3.09, 0.147, 0.516, 121, 1.14, 1.97, 99.8, 1260};
    case Kernel::kWholeGradient:
      break;
  }
  return costs_of(kernel, has_boxes);
}

/// For the kernel of whole layouts with a relative bias: the value that replaces `Costs::waiting`, and the number of
/// warps on an SM with which the factor on the time of a tile is 1. Layouts of 7 x 7 tokens took twice as long with 8
/// warps on an SM as with 16.
constexpr double kWaitingOfWhole = 5, kEnoughWarps = 16;

/// Costs of per-entry layouts, measured with a batch of four images on an H200. Half of the tokens were padding.
/// - kRealItems: fraction of a CTA's items that are not padding.
/// - kPlansOfEntries: number of plans per CTA.
/// - kPlanOverhead: extra time of a plan, in nanoseconds, if the SM has a single CTA. In this time, the CTA examines
///   its batch entries, and waits for its first loads.
constexpr double kRealItems = .5, kPlansOfEntries = 1.25, kPlanOverhead = 5000;

/// Returns the cost of an additional plan as a multiple of the time of a plan. A group of batch entries needs an
/// additional plan if a CTA processes only a part of the group's items. The cost was fitted on an H100 to the fastest
/// numbers of items per plan for two batches. Half of the tokens of these batches are padding.
constexpr double another_plan(Kernel kernel) {
  return kernel == Kernel::kForward ? 5 : 3;
}

/// Returns the number of tokens that a kernel loads or stores per tile, over all arrays with a row per token of the
/// tile.
constexpr double row_tokens(Kernel kernel) {
  // Two arrays count as one, because Costs::column is the time for two arrays. The forward kernel loads or stores two
  // arrays by rows (queries and outputs), the kernel of whole layouts three arrays, and the other kernels four.
  return kernel == Kernel::kForward ? kRows : kernel == Kernel::kWholeGradient ? 1.5 * kRows : 2 * kRows;
}

}  // namespace

Shares share_items(std::int64_t items, const Region& region, const Device& device) {
  const auto chunks_of = [&](std::int64_t items_per_cta) { return divide_up(items, items_per_cta); };
  const auto regions = static_cast<double>(region.count);
  const double slots = static_cast<double>(device.multiprocessors) * std::max(region.ctas, 1);
  double least = std::numeric_limits<double>::max();
  Shares best{items, 1};
  // Try the numbers of chunks with which CTAs fill the SMs' slots for CTAs once, twice and so on, rounded down and up.
  for (int rounds = 1; rounds <= kMostRounds; ++rounds) {
    const double fitting = std::min(rounds * slots / regions, static_cast<double>(std::min(items, kMostChunks)));
    for (const double chunks : {std::floor(fitting), std::ceil(fitting)}) {
      const std::int64_t items_per_cta = chunks_of(std::max<std::int64_t>(static_cast<std::int64_t>(chunks), 1));
      const double ctas = std::ceil(regions * static_cast<double>(chunks_of(items_per_cta)) / device.multiprocessors);
      const double time = ctas * (static_cast<double>(items_per_cta) + .5);
      if (time >= least) continue;
      least = time;
      best = {items_per_cta, ctas};
    }
  }
  return best;
}

namespace {

/// Time of an item of a CTA, and time of a plan, if `resident` CTAs share an SM.
struct CtaTime {
  double item, plan;

  CtaTime(Kernel kernel, int head_dim, Coverage coverage, const Region& region, double resident, bool has_ring_costs) {
    const Costs costs = (has_ring_costs ? costs_against_rings : costs_of)(kernel, region.has_boxes);
    const double width = head_dim / 32., warps = region.warps * resident,
                 unevenness = std::ceil(warps / 4) * 4 / warps - 1;
    const double wider = head_dim == 32 ? 1 : head_dim == 64 ? costs.factor_64 : costs.factor_128;
    // A tile whose warp is the only one on the SM takes about `waiting` times as long as a tile among many warps. In
    // the kernel of whole layouts, a relative bias may leave room for few warps only, because the sums for its gradient
    // occupy shared memory. Without a relative bias, there are always enough warps.
    const bool may_wait = kernel == Kernel::kWholeGradient && region.record > 0;
    const double alone = may_wait
                             ? std::hypot(1., kWaitingOfWhole / warps) / std::hypot(1., kWaitingOfWhole / kEnoughWarps)
                             : std::hypot(1., costs.waiting / warps);
    const double tile = (costs.pair * region.pairs + costs.tile) * wider * (1 + costs.uneven * unevenness) * alone;
    const double overlap = resident * (1 + costs.staged * (region.stages - 1));
    // Costs::column is the time for two arrays, so that two boxes of a stage count as one.
    const double columns = region.box * (boxes_of(kernel) / 2.);
    const double loading = (costs.column * (columns + row_tokens(kernel) * region.warps) * width + costs.item) *
                           (1 + costs.exposed / overlap);
    item = region.warps * tile + loading;
    plan = region.warps * costs.plan + costs.stage * (region.stages - 1);
    if (coverage == Coverage::kPerEntry) plan += kPlanOverhead / (resident * resident);
  }
};

}  // namespace

double estimate(Kernel kernel, int head_dim, Coverage coverage, const Region& region, const Shares& shares,
                bool has_ring_costs) {
  const double resident = std::min(shares.ctas, 1. * std::max(region.ctas, 1));
  const CtaTime time(kernel, head_dim, coverage, region, resident, has_ring_costs);
  double items = static_cast<double>(shares.items_of_cta), plans = 1;
  if (coverage == Coverage::kPerEntry) {
    items *= kRealItems;
    plans = kPlansOfEntries;
  }
  return kLaunch + shares.ctas * (items * time.item + plans * time.plan);
}

std::int64_t items_of_plan(Kernel kernel, int head_dim, const Region& region, const Device& device,
                           std::int64_t items) {
  const double resident = std::max(region.ctas, 1),
               slot_items = kRealItems * static_cast<double>(items) / (resident * device.multiprocessors);
  const CtaTime time(kernel, head_dim, Coverage::kPerEntry, region, resident, false);
  return std::max<std::int64_t>(std::llround(std::sqrt(2 * slot_items * another_plan(kernel) * time.plan / time.item)),
                                1);
}

double estimate_additional(const Problem& problem, const Device& device) {
  // Measured on an H200.
  // - kStart: nanoseconds until a CTA has started.
  // - kStep: nanoseconds per step. In a step, a CTA waits for the queries that its warps load at once.
  // - kBytes: bytes of sums that are written and read back per nanosecond.
  constexpr double kStart = 4000, kStep = 1300, kBytes = 1600;
  const int head_dim = compiled_head_dim(problem), columns_at_once = additional_pairs_at_once(head_dim) * 2 * kColumns;
  const std::int64_t columns = problem.queries() * problem.heads_per_kv(),
                     parts = additional_parts(columns, problem.additional_kv), heads = problem.batch * problem.heads_kv;
  const auto quotient = [](std::int64_t a, std::int64_t b) { return static_cast<double>(divide_up(a, b)); };
  const double ctas =
      static_cast<double>(heads) * quotient(parts, kAdditionalWarps) * quotient(problem.additional_kv, kRows);
  const double rounds = std::max(ctas / (device.multiprocessors * (head_dim > 32 ? 2. : 3.)), 1.);
  const double sums = 4. * static_cast<double>(parts * heads * problem.additional_kv) *
                      static_cast<double>(problem.head_dim + problem.head_dim_v);
  return 2 * kLaunch + rounds * (kStart + kStep * quotient(columns, parts * columns_at_once)) + sums / kBytes;
}

}  // namespace natten_jax::small
