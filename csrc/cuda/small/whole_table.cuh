// A relative bias and the sums for its gradient, as the kernel of all gradients of whole layouts goes over its items.
#pragma once

#include "cuda/small/region_sums.cuh"

namespace natten_jax::small {

/// The warps that have rows meet.
CUTE_DEVICE void meet(int warps) {
  asm volatile("bar.sync 1, %0;" : : "r"(32 * warps) : "memory");
}

/// Without one.
template <bool kHasBias>
struct WholeTable {
  CUTE_DEVICE WholeTable(const BackwardParams&, char*) {}
  CUTE_DEVICE void start(const Item&) const {}
  CUTE_DEVICE void plan(const TilePlan&, const Item&) const {}
  template <class Element>
  CUTE_DEVICE void add(const TilePlan&) const {}
  CUTE_DEVICE void write(const TilePlan&, const CtaItems&) const {}
};

template <>
struct WholeTable<true> {
  HeadTable table;
  RegionSums sums;

  CUTE_DEVICE WholeTable(const WholeBiasParams& p, char* raw) : table(p, raw), sums(p, raw) {}

  /// Before the plans: the table comes meanwhile. All threads call this, and the next one.
  CUTE_DEVICE void start(const Item& first) const { table.start(first); }
  CUTE_DEVICE void plan(const TilePlan& queries, const Item& first) const {
    table.finish(first);
    sums.plan(queries);
  }

  /// Adds what an item has.
  template <class Element>
  CUTE_DEVICE void add(const TilePlan& queries) const {
    sums.add<Element>(queries);
  }

  /// When warps have met after the last item was added. Behind the loop over items: within it, everybody would jump
  /// over the instructions.
  CUTE_DEVICE void write(const TilePlan& queries, const HeadItems& items) const {
    if (queries.has_rows) sums.write(items);
  }
};

}  // namespace natten_jax::small
