// Outer loop of kernels with regions: a loop over the plans of a CTA.
#pragma once

#include "cuda/common/launch.cuh"
#include "cuda/small/entries.cuh"

namespace natten_jax::small {

/// Calls `call(items, layout, is_first)` for each plan of a CTA. Without per-entry layouts, a CTA has a single plan.
template <class Items, Owner kOwner, class Call>
CUTE_DEVICE void for_plans(const CommonParams& p, char* raw, const Call& call) {
  if constexpr (Items::kPerEntry) {
    // The kernel that owns keys is launched after the kernel that owns queries, and may start before the latter ends.
    // It waits only before it reads the results of the kernel that owns queries. It need not wait for its own tensor
    // maps, because they are made before the tensor maps of the kernel that owns queries.
    allow_next_kernel();
    EntryState& state = *reinterpret_cast<EntryState*>(raw + p.region.shared.batch_entries);
    int first_entry, piece;
    p.by_pieces(first_entry, piece, blockIdx.y);
    first_entry *= p.entries_of_cta;
    if (threadIdx.x < 32) group_entries<kOwner == Owner::kKeys>(p, first_entry, state);
    __syncthreads();
    Items items;
    EntryLayout layout;
    for (bool is_first = true; take_piece(p, state, first_entry, piece, items, layout); is_first = false) {
      if (!is_first) __syncthreads();  // the previous plan's tables and stages are free
      call(items, layout, is_first);
      piece += p.by_pieces.divisor;
    }
    // Keep the PDL chain transitive: the next kernel must not start before the previous one has ended, even if this
    // kernel does not wait for the previous one otherwise.
    if (blockIdx.x == 0 && blockIdx.y == 0) wait_for_previous_kernel();
  } else {
    call(Items(p), EntryLayout{}, true);
  }
}

}  // namespace natten_jax::small
