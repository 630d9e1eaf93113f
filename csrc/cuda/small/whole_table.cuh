// Relative bias and the sums for its gradient in the kernel of all gradients of whole layouts.
#pragma once

#include "cuda/small/region_sums.cuh"

namespace natten_jax::small {

/// Synchronizes the warps that have rows.
CUTE_DEVICE void meet(int warps) {
  asm volatile("bar.sync 1, %0;" : : "r"(32 * warps) : "memory");
}

/// Empty functions for kernels without a relative bias.
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

  /// Starts to copy the table. Called before planning, which overlaps with the copy. All threads have to call this and
  /// `plan`.
  CUTE_DEVICE void start(const Item& first) const { table.start(first); }
  CUTE_DEVICE void plan(const TilePlan& queries, const Item& first) const {
    table.finish(first);
    sums.plan(queries);
  }

  /// Adds an item's sums.
  template <class Element>
  CUTE_DEVICE void add(const TilePlan& queries) const {
    sums.add<Element>(queries);
  }

  /// Writes the sums, after the last item was added and warps have synchronized. The call is outside of the loop over
  /// items, where every warp would jump over its instructions.
  CUTE_DEVICE void write(const TilePlan& queries, const HeadItems& items) const {
    if (queries.has_rows) sums.write(items);
  }
};

}  // namespace natten_jax::small
