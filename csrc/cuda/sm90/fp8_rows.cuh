// Forward kernel for 8-bit floats: steps of a consumer warpgroup's loops over query tiles, and over the key tiles that
// the warpgroup's rows attend to.
//
// The kernel for 16-bit elements has a copy of these steps in forward_attention.cuh. If the 16-bit kernel used the
// class in this file, ptxas would allocate that kernel's registers differently.
#pragma once

#include "cuda/sm90/forward_mask.cuh"
#include "cuda/sm90/forward_products.cuh"
#include "cuda/sm90/online_softmax.cuh"

namespace natten_jax::sm90 {

/// Moves through the query tiles and key tiles of a warpgroup, and computes the masks of its 64 rows. All methods are
/// inlined, so that members stay in registers.
template <class Traits>
class Float8Rows {
 public:
  using SharedStorage = typename Traits::SharedStorage;

 protected:
  CUTE_DEVICE Float8Rows(const ForwardParams& p, SharedStorage& shared)
      : p(p),
        shared(shared),
        thread(threadIdx.x % 128),
        warpgroup(cutlass::canonical_warp_group_idx() - 1),
        mask_of_rows{{RowPosition(p, first_row()), RowPosition(p, first_row() + 8)}, build_mask(p, shared)},
        order(warpgroup) {}

  /// First of the two rows of which the thread holds elements. The second one is row `first_row() + 8`.
  CUTE_DEVICE int first_row() const { return warpgroup * 64 + thread / 32 * 16 + threadIdx.x % 32 / 4; }

  /// Moves to the next query tile, and waits for its plan and its queries. Returns false if no query tile is left.
  CUTE_DEVICE bool next_plan() {
    slot.wait_full(shared.full_plan);
    left = shared.plan[slot.index].kv_tiles;
    if (left < 0) return false;
    mask_of_rows.start();
    left += p.additional_tiles;
    query.wait_full(shared.full_q);
    query.advance();
    return true;
  }

  /// Releases the buffer of Q after the query tile's last key tile, unless Q is in registers.
  CUTE_DEVICE void release_query() {
    if constexpr (!Traits::kQueryInRegisters) {
      if (left == 0) arrive(shared.empty_q);
    }
  }

  /// Waits until the key tile at `keys` is loaded, and returns its mask mode for this warpgroup.
  CUTE_DEVICE int mask_in(Ring<Traits::kStages> keys) const {
    keys.wait_full(shared.full_k);
    return shared.tile[keys.index].w >> kMaskBits * warpgroup & kHidden;
  }

  CUTE_DEVICE void await_values() const { v.wait_full(shared.full_transposed); }
  CUTE_DEVICE void release_values() {
    arrive(shared.empty_transposed[v.index]);
    v.advance();
  }
  CUTE_DEVICE void release_keys() {
    arrive(shared.empty_k[k.index]);
    k.advance();
  }

  /// Skips key/value tiles to which no row of the warpgroup attends. Returns false if no key/value tile of the query
  /// tile is left.
  CUTE_DEVICE bool skip_hidden_tiles() {
    while (left > 0) {
      mask = mask_in(k);
      if (mask != kHidden) return true;
      --left;
      release_query();
      order.await_turn();
      order.pass_turn();
      release_keys();
      await_values();
      release_values();
    }
    return false;
  }

  /// Computes the mask of the current key tile, and reads the mask mode of the next key tile. Called while the product
  /// for the logits of the current tile runs.
  CUTE_DEVICE void plan_mask() {
    const int4 tile = shared.tile[k.index];
    if (mask == kWindowMask) {
      const TilePlan& plan = shared.plan[slot.index];
      if (mask_of_rows.is_new_line(tile)) {
        slot.wait_full(shared.full_windows);
        mask_of_rows.start_line(p, plan, tile);
      }
      mask_of_rows.set_visible(p, plan, tile);
    } else if (mask == kEndMask) {
      mask_of_rows.set_first_visible(p.additional_kv - tile.z, threadIdx.x % 4);
    }
    next_mask = kHidden;
    if (left > 1) next_mask = mask_in(k.next());
  }

  const ForwardParams& p;
  SharedStorage& shared;
  int thread, warpgroup;
  WindowMask mask_of_rows;
  ProductOrder<Traits> order;
  Ring<Traits::kStages> k;
  Ring<Traits::kValueStages> v;
  Ring<Traits::kPlans> slot;  // Slot with the plan of the current query tile.
  SingleBuffer query, output;
  int left;             // Number of key/value tiles of the query tile that are left.
  int mask, next_mask;  // Mask modes of the current key/value tile and of the next one.

 private:
  CUTE_DEVICE static LaneMask<KeyColumnMask> build_mask(const ForwardParams& p, SharedStorage& shared) {
    const KeyColumnMask column_mask(shared.mask_words, p.axis);
    column_mask.template build<Traits::kColumns>(p.axis, threadIdx.x / 32 - 4, Traits::kConsumers / 32, &p.kv_boxes);
    cutlass::arch::NamedBarrier::sync(Traits::kConsumers, named_barrier(kMaskReady));
    return {column_mask, static_cast<int>(threadIdx.x % 4)};
  }
};

}  // namespace natten_jax::sm90
