// Cost model of launches with a region, which chooses regions and tiles.
#pragma once

#include "cuda/small/region.h"

namespace natten_jax::small {

/// Distribution of a launch's items over CTAs.
struct Shares {
  std::int64_t items_of_cta;
  double ctas;  ///< Maximum CTAs per SM, one after another.
};

/// Distributes items over CTAs so that all SMs finish at about the same time. A CTA's plan takes about half of an
/// item's time.
Shares share_items(std::int64_t items, const Region& region, const Device& device);

/// Estimates the nanoseconds of a launch.
///
/// Args:
///   is_beside_rings: true if such problems have been timed against rings (is_timed_beside_rings).
double estimate(Kernel kernel, int head_dim, Places places, const Region& region, const Shares& shares,
                bool is_beside_rings);

/// Returns the maximum items per plan with per-entry layouts. Fewer items mean more plans; more items mean a longer
/// wait for the last CTA: half a CTA on average.
///
/// Args:
///   items: number of items of all regions, as if the layouts had no padding.
std::int64_t items_of_plan(Kernel kernel, int head_dim, const Region& region, const Device& device, std::int64_t items);

/// Estimates the nanoseconds of the launches for gradients of additional tokens.
double estimate_additional(const Problem& problem, const Device& device);

}  // namespace natten_jax::small
