// How long a launch with a region takes: a model, by which regions and tiles are chosen.
#pragma once

#include "cuda/small/region.h"

namespace natten_jax::small {

/// How the CTAs of a launch share its items.
struct Shares {
  std::int64_t items_of_cta;
  double ctas;  ///< Most CTAs of a multiprocessor, one after another.
};

/// Splits the items among CTAs: so many for each region that all multiprocessors are done at about the same time. A
/// CTA's plan takes about as long as half an item.
Shares share_items(std::int64_t items, const Region& region, const Device& device);

/// Nanoseconds of a launch.
///
/// Args:
///   is_beside_rings: that such problems have been timed beside rings (is_timed_beside_rings).
double estimate(Kernel kernel, int head_dim, Places places, const Region& region, const Shares& shares,
                bool is_beside_rings);

/// How many items a plan should have at most where batch entries have layouts of their own. With fewer there are more
/// plans, with more of them all wait longer for the CTA that is done last: for half of one, on average.
///
/// Args:
///   items: of all regions, were nothing of the layouts padding.
std::int64_t items_of_plan(Kernel kernel, int head_dim, const Region& region, const Device& device, std::int64_t items);

/// Those of the launches for gradients of additional tokens.
double estimate_additional(const Problem& problem, const Device& device);

}  // namespace natten_jax::small
