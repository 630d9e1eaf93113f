// Work of the consumer warpgroups of the forward kernel: logits, softmax, output.
#pragma once

#include "cuda/sm90/forward_key_bias.cuh"
#include "cuda/sm90/forward_mask.cuh"
#include "cuda/sm90/forward_products.cuh"
#include "cuda/sm90/online_softmax.cuh"

namespace natten_jax::sm90 {

/// Computes the products and the softmax for the 64 rows that a warpgroup has in every query tile.
///
/// `run` loops over all tiles, and the other methods are its steps. All methods are inlined, so that members stay in
/// registers.
template <class Traits>
class Attention {
 public:
  using Element = typename Traits::Element;
  using SharedStorage = typename Traits::SharedStorage;

  CUTE_DEVICE Attention(const ForwardParams& p, SharedStorage& shared)
      : p(p),
        shared(shared),
        thread(threadIdx.x % 128),
        warpgroup(cutlass::canonical_warp_group_idx() - 1),
        products(shared, warpgroup, thread),
        mask_of_rows{{RowPosition(p, first_row()), RowPosition(p, first_row() + 8)}, build_mask(p, shared)},
        order(warpgroup) {
    // If the launch continues earlier ones, TMA first loads the output of these launches into the output buffer. This
    // branch and the one in `finish_query_tile` test `p.continues` instead of `continues<Traits>(p)`, which would
    // remove both branches from the kernels for plain problems. Removing them would change how ptxas schedules the
    // softmax of these kernels, but neither schedule was shown to be faster.
    if (p.continues) output.advance();
  }

  CUTE_DEVICE void run() {
    order.start();
    start_output();
    if (!next_query_tile()) return;
    scale_logits();
    skip_hidden_tiles();
    start_first_s();
    order.pass_turn();
    // Without this wait, ptxas allocates different registers for the logits (S) at the entry and at the back edge of
    // the loop.
    warpgroup_wait<0>();
    int finished;
    while (true) {
      plan_mask();
      warpgroup_wait<0>();
      finish_s();
      to_weights();
      // Computes the logits of a key tile while the weighted values of the previous tile are added to the output.
      while (mask != kHidden) {
        start_s();
        start_o();
        order.pass_turn();
        plan_mask();
        warpgroup_wait<1>();
        finish_s();
        warpgroup_wait<0>();
        finish_o();
        to_weights();
      }
      start_o();
      warpgroup_wait<0>();
      finish_o();
      if (skip_hidden_tiles()) {
        start_s();
        order.pass_turn();
        continue;
      }
      finished = slot.index;
      slot.advance();
      if constexpr (!Traits::kSeparateOutput) finish_query_tile(finished);
      if (!next_query_tile()) break;
      skip_hidden_tiles();
      start_first_s();
      order.pass_turn();
      // Completes the previous query tile while the first logits of the next one are computed.
      if constexpr (Traits::kSeparateOutput) finish_query_tile(finished);
      scale_logits();
    }
    if constexpr (Traits::kSeparateOutput) finish_query_tile(finished);
  }

 private:
  static constexpr int kColumns = Traits::kColumns;

  /// First of the two rows of which the thread holds elements. The second one is row `first_row() + 8`.
  CUTE_DEVICE int first_row() const { return warpgroup * 64 + thread / 32 * 16 + threadIdx.x % 32 / 4; }

  CUTE_DEVICE static LaneMask<KeyColumnMask> build_mask(const ForwardParams& p, SharedStorage& shared) {
    const KeyColumnMask column_mask(shared.mask_words, p.axis);
    column_mask.template build<kColumns>(p.axis, threadIdx.x / 32 - 4, Traits::kConsumers / 32, &p.kv_boxes);
    cutlass::arch::NamedBarrier::sync(Traits::kConsumers, named_barrier(kMaskReady));
    return {column_mask, static_cast<int>(threadIdx.x % 4)};
  }
  CUTE_DEVICE auto logits() { return AccumulatorRows(products.s); }

  CUTE_DEVICE void start_output() {
    clear(products.o);
    softmax.start();
  }

  /// Moves to the next query tile, and waits for its plan and its queries. Returns false if no query tile is left.
  CUTE_DEVICE bool next_query_tile() {
    slot.wait_full(shared.full_plan);
    left = shared.plan[slot.index].kv_tiles;
    if (left < 0) return false;
    mask_of_rows.start();
    left += p.additional_tiles;
    query.wait_full(shared.full_q);
    query.advance();
    return true;
  }

  /// Reads the scale of the current query tile's head. Must be called after the sums of the previous query tile are
  /// complete, because they use the previous scale.
  CUTE_DEVICE void scale_logits() { softmax.exponent_scale = shared.plan[slot.index].exponent_scale; }

  CUTE_DEVICE void load_query() {
    const auto copy_q = make_tiled_copy_A(Copy_Atom<SM75_U32x4_LDSM_N, Element>{}, Traits::query_key_product());
    const auto thread_copy = copy_q.get_thread_slice(thread);
    const Tensor tile = products.rows_of_group(shared.q, warpgroup);
    copy(copy_q, thread_copy.partition_S(as_position_independent_swizzle_tensor(tile)),
         thread_copy.retile_D(products.query));
  }

  /// Releases the buffer of Q after the query tile's last key tile, unless Q is in registers or the buffer also
  /// receives the output.
  CUTE_DEVICE void release_query() {
    if constexpr (Traits::kSeparateOutput && !Traits::kQueryInRegisters) {
      if (left == 0) arrive(shared.empty_q);
    }
  }

  /// Waits until the key tile at `keys` is loaded, and returns its mask mode for this warpgroup.
  CUTE_DEVICE int mask_in(Ring<Traits::kStages> keys) const {
    keys.wait_full(shared.full_k);
    return shared.tile[keys.index].w >> kMaskBits * warpgroup & kHidden;
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
      arrive(shared.empty_k[k.index]);
      k.advance();
      if constexpr (Traits::kHasKeyBias) bias.advance();
      v.wait_full(shared.full_v);
      arrive(shared.empty_v[v.index]);
      v.advance();
    }
    return false;
  }

  CUTE_DEVICE void start_s() {
    order.await_turn();
    products.start_s(k.index, p.head_dim);
  }

  /// Starts the product for the logits of the query tile's first key tile. If the product reads Q from registers, first
  /// loads Q from its buffer in shared memory. This buffer is free once the wgmma is issued, because the wgmma waits
  /// for the registers of Q.
  CUTE_DEVICE void start_first_s() {
    if constexpr (Traits::kQueryInRegisters) load_query();
    start_s();
    if constexpr (Traits::kQueryInRegisters) arrive(shared.empty_q);
  }

  CUTE_DEVICE void start_o() {
    v.wait_full(shared.full_v);
    products.start_o(v.index);
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
    if constexpr (Traits::kHasKeyBias) bias.wait_full(shared.full_biases);
  }

  CUTE_DEVICE void finish_s() {
    auto& s = products.s;
    warpgroup_fence_operand(s);
    arrive(shared.empty_k[k.index]);
    if constexpr (Traits::kHasKeyBias) {
      add_biases<Traits>(logits(), shared.key_bias[bias.index]);
      bias.advance();
    }
    k.advance();
    --left;
    release_query();
    if (mask != kNoMask) logits().replace_masked(mask_of_rows.visible, -INFINITY);
    mask = next_mask;
    softmax.find_references(logits());
  }

  CUTE_DEVICE void finish_o() {
    warpgroup_fence_operand(products.o);
    arrive(shared.empty_v[v.index]);
    v.advance();
  }

  CUTE_DEVICE void to_weights() {
    Tensor pairs = recast<std::uint32_t>(products.weights);
    softmax.weigh(logits(), pairs);
    if (softmax.is_special()) {
      softmax.correct_weights(logits(), pairs);
      auto& o = products.o;
      CUTE_UNROLL
      for (int e = 0; e < size(o); ++e) {
        const int row = (e / 2) % 2;
        o(e) *= softmax.must_rescale[row] ? softmax.rescale[row] : 1.f;
      }
    }
    softmax.add_weights();
  }

  /// Completes the query tile whose plan is in slot `finished`: passes its output to the warp that stores it, and
  /// resets the output and the softmax for the next query tile.
  CUTE_DEVICE void finish_query_tile(int finished) {
    softmax.finish();
    RowSums sums = softmax.sums();
    if constexpr (Traits::kSeparateOutput) {
      if (p.continues) merge_earlier(sums);
    }
    const TilePlan& plan = shared.plan[finished];
    const float sink = sink_of(p.scale, p.scale.for_head(plan.batch * p.heads + plan.head));
    if (sink != -INFINITY) sums.add(sink);
    store_output(sums);
    store_statistics(p, plan, mask_of_rows, sums);
    arrive(shared.empty_plan[finished]);
    start_output();
  }

  /// Waits until TMA has loaded the output of earlier launches into the output buffer, and merges it with the output of
  /// this launch.
  CUTE_DEVICE void merge_earlier(RowSums& sums) {
    output.wait_empty(shared.empty_o);
    float kept[2], own[2];
    share_with_row(sums.merge(shared.earlier[first_row() + (completes_second_row() ? 8 : 0)]), kept);
    share_with_row(sums.normalisation, own);
    sums.normalisation = 1.f;
    auto& o = products.o;
    Tensor earlier = make_tensor<Element>(o.layout());
    const Tensor tile = products.rows_of_group(shared.o, warpgroup);
    const auto copy_o = make_tiled_copy_C(Copy_Atom<SM75_U32x4_LDSM_N, Element>{}, Traits::weight_value_product());
    const auto thread_copy = copy_o.get_thread_slice(thread);
    copy(copy_o, thread_copy.partition_S(as_position_independent_swizzle_tensor(tile)), thread_copy.retile_D(earlier));
    CUTE_UNROLL
    for (int e = 0; e < size(o); ++e) {
      const int i = e / 2 % 2;
      o(e) = o(e) * own[i] + static_cast<float>(earlier(e)) * kept[i];
    }
  }

  CUTE_DEVICE void store_output(const RowSums& sums) {
    const auto& o = products.o;
    float normalisation[2];
    share_with_row(sums.normalisation, normalisation);
    Tensor result = make_tensor<Element>(o.layout());
    Tensor pairs = recast<std::uint32_t>(result);
    CUTE_UNROLL
    for (int e = 0; e < size(pairs); ++e) {
      pairs(e) = pack<Element>(o(2 * e) * normalisation[e % 2], o(2 * e + 1) * normalisation[e % 2]);
      // Without a separate output tile, the output overwrites Q. Rows past the end of the query tile must stay zero,
      // because no later load of Q writes them, and the warp votes of the softmax include their logits.
      if (!Traits::kSeparateOutput && !mask_of_rows.row[e % 2].exists()) pairs(e) = 0;
    }
    // A separate output tile may still be read by the previous TMA store, so the warpgroup waits. Without a separate
    // tile, it overwrites its own rows of Q and need not wait.
    if constexpr (Traits::kSeparateOutput) {
      output.wait_empty(shared.empty_o);
      output.advance();
    }
    const Tensor tile = products.rows_of_group(Traits::kSeparateOutput ? shared.o : shared.q, warpgroup);
    const auto copy_o = make_tiled_copy_C(Copy_Atom<SM90_U32x4_STSM_N, Element>{}, Traits::weight_value_product());
    const auto thread_copy = copy_o.get_thread_slice(thread);
    copy(copy_o, thread_copy.retile_S(result), thread_copy.partition_D(as_position_independent_swizzle_tensor(tile)));
    cutlass::arch::fence_view_async_shared();
    cutlass::arch::NamedBarrier::arrive(Traits::kConsumers + kWarp, named_barrier(kOutputReady));
  }

  const ForwardParams& p;
  SharedStorage& shared;
  int thread, warpgroup;
  AttentionProducts<Traits> products;
  WindowMask mask_of_rows;
  ProductOrder<Traits> order;
  OnlineSoftmax<Element> softmax;
  Ring<Traits::kStages> k, v;
  std::conditional_t<Traits::kHasKeyBias, Ring<Traits::kBiasStages>, std::nullptr_t> bias;
  Ring<Traits::kPlans> slot;  // Slot with the plan of the current query tile.
  SingleBuffer query, output;
  int left;             // Number of key/value tiles of the query tile that are left.
  int mask, next_mask;  // Mask modes of the current key/value tile and of the next one.
};

}  // namespace natten_jax::sm90
