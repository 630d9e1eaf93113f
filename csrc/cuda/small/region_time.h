// Cost model of launches with a region. Its estimates decide which region and tiles a launch uses.
#pragma once

#include "cuda/small/region.h"

namespace natten_jax::small {

/// Distribution of a launch's items over CTAs.
struct Shares {
  std::int64_t items_of_cta;
  double ctas;  ///< Maximum number of CTAs that an SM runs in the launch.
};

/// Distributes items over CTAs so that all SMs finish at about the same time. The time of a CTA's plan is assumed to be
/// half of the time of an item.
Shares share_items(std::int64_t items, const Region& region, const Device& device);

/// Estimates the time of a launch, in nanoseconds.
///
/// Args:
///   has_ring_costs: true if regions were timed against rings for problems like this one (is_timed_against_rings).
double estimate(Kernel kernel, int head_dim, Coverage coverage, const Region& region, const Shares& shares,
                bool has_ring_costs);

/// Returns the maximum number of items per plan with per-entry layouts. With fewer items per plan, there are more
/// plans. With more items per plan, other SMs wait longer for the CTA that ends last: on average, for half of a CTA's
/// time.
///
/// Args:
///   items: total number of items of all regions, including items of padding.
std::int64_t items_of_plan(Kernel kernel, int head_dim, const Region& region, const Device& device, std::int64_t items);

/// Estimates the time of the launches that compute gradients of additional tokens, in nanoseconds.
double estimate_additional(const Problem& problem, const Device& device);

}  // namespace natten_jax::small
