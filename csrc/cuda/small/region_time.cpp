#include "cuda/small/region_time.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace natten_jax::small {
namespace {

/// Of a region's items: the second dimension of a grid.
constexpr std::int64_t kMostChunks = 65535;

/// How often CTAs take turns on a multiprocessor; more often, each one's plan counts too much.
constexpr int kMostRounds = 4;

/// Nanoseconds that parts of a multiprocessor's work take, and factors of them.
struct Costs {
  double tile;     ///< Of a tile, whatever it sees.
  double pair;     ///< Of a pair of groups of heads of 32.
  double column;   ///< Of a token of heads of 32 that comes from memory, or goes there.
  double exposed;  ///< By how much longer those take where a multiprocessor does nothing beside them.
  double waiting;  ///< By how much longer all else takes of one warp alone.
  double uneven;   ///< How much of what a multiprocessor's parts have unequally many warps counts.
  double staged;   ///< How much a second stage counts beside another CTA.
  double plan;     ///< Of a warp's plan.
  double width;    ///< The power of heads' width that a pair grows with.
  double item;     ///< Of an item of a CTA.
  double stage;    ///< Of a second stage's start.
};

/// Of a launch with next to nothing to do.
constexpr double kLaunch = 2300;

/// Fitted to times of 7,600 regions of 15 small-window problems on an H200: they predict most of the best ones' within
/// 15%, and the regions that they choose took 2% longer than these on average, and at most 13%.
constexpr Costs costs_of(Kernel kernel, bool has_boxes) {
  switch (kernel) {
    case Kernel::kForward:
      return has_boxes ? Costs{57.9, 14.4, 0.0275, 15, 2.54, 0.507, 2.81, 82.1, 0.648, 38.4, 353}
                       : Costs{39.1, 15.1, 0.0353, 15, 3.84, 0.837, 0.525, 168, 0.648, 61, 375};
    case Kernel::kQueryGradient:
      return has_boxes ? Costs{84.2, 17.1, 0.0273, 15, 1.67, 0.468, 0.768, 103, 0.65, 49.8, 476}
                       : Costs{76, 19.9, 0.0217, 15, 3.05, 0.527, 0.718, 191, 0.729, 65.7, 703};
    case Kernel::kKeyValueGradient:
      return has_boxes ? Costs{90.7, 24, 0.02, 12.7, 1.74, 0.364, 0.174, 98.3, 0.647, 88.9, 694}
                       : Costs{78.7, 24.1, 0.0364, 15, 1.84, 0.435, 0.247, 143, 0.649, 117, 742};
    case Kernel::kWholeGradient:
      return {1, 76.3, 0.0223, 0.519, 0.5, 0.02, 12, 201, 1, 575, 1140};
  }
  return {};
}

/// Tokens of a tile's rows that are loaded or stored: of the arrays that a kernel reads or writes by rows.
constexpr double row_tokens(Kernel kernel) {
  // Two arrays count as one: a query and its output in the forward pass, else four arrays or three.
  return kernel == Kernel::kForward ? kRows : kernel == Kernel::kWholeGradient ? 1.5 * kRows : 2 * kRows;
}

}  // namespace

Shares share_items(std::int64_t items, const Region& region, const Device& device) {
  const auto chunks_of = [&](std::int64_t each) { return (items + each - 1) / each; };
  const auto regions = static_cast<double>(region.count);
  const double slots = static_cast<double>(device.multiprocessors) * std::max(region.ctas, 1);
  double least = std::numeric_limits<double>::max();
  Shares best{items, 1};
  // As many as fill the slots once, twice and so on, or a little more.
  for (int rounds = 1; rounds <= kMostRounds; ++rounds) {
    const double fitting = std::min(rounds * slots / regions, static_cast<double>(std::min(items, kMostChunks)));
    for (const double chunks : {std::floor(fitting), std::ceil(fitting)}) {
      const std::int64_t each = chunks_of(std::max<std::int64_t>(static_cast<std::int64_t>(chunks), 1));
      const double ctas = std::ceil(regions * static_cast<double>(chunks_of(each)) / device.multiprocessors);
      const double time = ctas * (static_cast<double>(each) + .5);
      if (time >= least) continue;
      least = time;
      best = {each, ctas};
    }
  }
  return best;
}

double estimate(Kernel kernel, int head_dim, const Region& region, const Shares& shares) {
  const Costs costs = costs_of(kernel, region.has_boxes);
  const double width = head_dim / 32., resident = std::min(shares.ctas, 1. * std::max(region.ctas, 1));
  const double warps = region.warps * resident, unevenness = std::ceil(warps / 4) * 4 / warps - 1;
  const double tile = (costs.pair * region.pairs * std::pow(width, costs.width) + costs.tile) *
                      (1 + costs.uneven * unevenness) * (1 + costs.waiting / warps);
  const double overlap = resident * (1 + costs.staged * (region.stages - 1));
  // Of the boxes of a stage, two count as one column.
  const double columns = region.box * (kernel == Kernel::kWholeGradient ? 2.5 : 1);
  const double loading = (costs.column * (columns + row_tokens(kernel) * region.warps) * width + costs.item) *
                         (1 + costs.exposed / overlap);
  const double of_cta = static_cast<double>(shares.items_of_cta) * (region.warps * tile + loading) +
                        region.warps * costs.plan + costs.stage * (region.stages - 1);
  return kLaunch + shares.ctas * of_cta;
}

}  // namespace natten_jax::small
