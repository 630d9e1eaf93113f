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
  double pair;     ///< Of a pair of groups of heads of 32; wider ones take less than in proportion.
  double column;   ///< Of a token of heads of 32 that comes from memory, or goes there.
  double exposed;  ///< By how much longer those take where a multiprocessor does nothing beside them.
  double waiting;  ///< By how much longer all else takes of one warp alone.
  double uneven;   ///< How much of what a multiprocessor's parts have unequally many warps counts.
  double staged;   ///< How much a second stage counts beside another CTA.
  double plan;     ///< Of a warp's plan.
};
constexpr double kWidthExponent = 0.75;

/// Of a launch with next to nothing to do.
constexpr double kLaunch = 1500;

/// Fitted to times of 2,700 regions of small-window problems on an H200: they predict most of the best ones' within
/// 15%, and the regions that they choose took 3% longer than these, and at most 17%.
constexpr Costs costs_of(Kernel kernel, bool has_boxes) {
  switch (kernel) {
    case Kernel::kForward:
      return has_boxes ? Costs{68.7, 9.44, 0.139, 6.33, 7.56, 0.207, 7.82, 257}
                       : Costs{63.0, 6.03, 0.131, 6.44, 14.0, 0.442, 11.4, 647};
    case Kernel::kQueryGradient:
      return has_boxes ? Costs{38.2, 33.0, 0.423, 3.58, 3.20, 0.119, 0.640, 342}
                       : Costs{24.1, 32.6, 0.180, 3.85, 6.19, 0.104, 3.97, 947};
    case Kernel::kKeyValueGradient:
      return has_boxes ? Costs{38.5, 0.185, 0.179, 8.80, 63.1, 0.305, 0.898, 478}
                       : Costs{119, 1.16, 0.456, 2.28, 15.1, 0.417, 2.99, 301};
    case Kernel::kWholeGradient:
      return Costs{.1, .1, 0.01, 3.6, 3.2, .12, .64, 1};
  }
  return {};
}

/// Tokens of a tile's rows that are loaded or stored: of the arrays that a kernel reads or writes by rows.
constexpr double row_tokens(Kernel kernel) {
  // In the forward pass a query and its output, which count as one column; else four arrays.
  return kernel == Kernel::kForward ? kRows : 2 * kRows;
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
  const double tile = (costs.pair * region.pairs * std::pow(width, kWidthExponent) + costs.tile) *
                      (1 + costs.uneven * unevenness) * (1 + costs.waiting / warps);
  const double overlap = resident * (1 + costs.staged * (region.stages - 1));
  const double loading =
      costs.column * (region.box + row_tokens(kernel) * region.warps) * width * (1 + costs.exposed / overlap);
  const double of_cta =
      static_cast<double>(shares.items_of_cta) * (region.warps * tile + loading) + region.warps * costs.plan;
  return kLaunch + shares.ctas * of_cta;
}

}  // namespace natten_jax::small
