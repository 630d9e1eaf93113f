// Relative bias table and the sums for its gradient, in the kernel that computes all gradients of whole layouts.
#pragma once

#include "cuda/small/region_sums.cuh"

namespace natten_jax::small {

/// Synchronizes the warps that have rows; `warps` is their number.
CUTE_DEVICE void sync_warps(int warps) {
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

  /// Starts to copy the table to shared memory. The kernel calls this function before make_plan, so that the copy
  /// overlaps with planning. All threads have to call this function and `plan`.
  CUTE_DEVICE void start(const Item& first) const { table.start(first); }
  CUTE_DEVICE void plan(const TilePlan& queries, const Item& first) const {
    table.finish(first);
    sums.plan(queries);
  }

  /// Adds the logit gradients of the item's tile to the sums.
  template <class Element>
  CUTE_DEVICE void add(const TilePlan& queries) const {
    sums.add<Element>(queries);
  }

  /// Writes the sums to global memory. Call this function after the gradients of the last item were added and the warps
  /// have synchronized. The call is not inside of the loop over items, because every warp would then have to jump over
  /// the instructions of this function in each iteration.
  CUTE_DEVICE void write(const TilePlan& queries, const HeadItems& items) const {
    if (queries.has_rows) sums.write(items);
  }
};

}  // namespace natten_jax::small
