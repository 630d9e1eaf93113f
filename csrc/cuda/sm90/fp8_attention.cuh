// Work of the consumer warpgroups of the forward kernel for 8-bit floats: logits, softmax, output.
#pragma once

#include "cuda/sm90/fp8_products.cuh"
#include "cuda/sm90/fp8_rows.cuh"
#include "cuda/sm90/fp8_softmax.cuh"

namespace natten_jax::sm90 {

/// Computes the products and the softmax for the 64 rows that a warpgroup has in every query tile.
///
/// `run` loops over all tiles, and the other methods are its steps. All methods are inlined, so that members stay in
/// registers.
template <class Traits>
class Float8Attention : private Float8Rows<Traits> {
 public:
  using Rows = Float8Rows<Traits>;
  using typename Rows::SharedStorage;
  using Products = Float8Products<Traits>;

  CUTE_DEVICE Float8Attention(const ForwardParams& p, SharedStorage& shared)
      : Rows(p, shared), products(shared, warpgroup, thread) {}

  CUTE_DEVICE void run() {
    order.start();
    start_output();
    if (!next_plan()) return;
    scale_logits();
    skip_hidden_tiles();
    start_first_logits();
    int finished;
    while (true) {
      while (true) {
        plan_mask();
        warpgroup_wait<0>();
        release_logits();
        to_weights();
        if (mask == kHidden) break;
        // Adds the weighted values of this key tile to the output, and starts the product for the logits of the next
        // key tile.
        order.await_turn();
        exchange<true>();
        order.pass_turn();
      }
      exchange<false>();
      if (skip_hidden_tiles()) {
        start_logits();
        continue;
      }
      finished = slot.index;
      slot.advance();
      if (!next_plan()) break;
      skip_hidden_tiles();
      start_first_logits();
      // Completes the previous query tile while the first logits of the next one are computed.
      finish_query_tile(finished);
      scale_logits();
    }
    finish_query_tile(finished);
  }

 private:
  using Rows::await_values, Rows::first_row, Rows::next_plan, Rows::plan_mask, Rows::skip_hidden_tiles;
  using Rows::left, Rows::mask, Rows::mask_of_rows, Rows::next_mask;
  using Rows::p, Rows::shared, Rows::thread, Rows::warpgroup, Rows::order, Rows::k, Rows::v, Rows::slot, Rows::output;
  using Rows::release_keys, Rows::release_query, Rows::release_values;

  CUTE_DEVICE void start_output() {
    clear(products.o);
    softmax.start();
  }

  /// Reads the scale of the current query tile's head. Must be called after the sums of the previous query tile are
  /// complete, because they use the previous scale.
  CUTE_DEVICE void scale_logits() { softmax.exponent_scale = shared.plan[slot.index].exponent_scale; }

  /// Loads Q from shared memory to registers. For each k-step, ldmatrix loads the warp's 16 rows of 32 bytes as four
  /// 8x8 matrices of 16-bit elements.
  CUTE_DEVICE void load_query() {
    const int lane = threadIdx.x % 32, row = warpgroup * 64 + thread / 32 * 16 + lane % 16;
    const std::uint32_t row_address = shared_address(shared.q) + row * kSwizzledRow;
    Tensor word = recast<std::uint32_t>(products.query);
    CUTE_UNROLL
    for (int k = 0; k < Traits::kQuerySteps; ++k) {
      const std::uint32_t address = row_address + 16 * ((2 * k + lane / 16) ^ row % 8);
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(word(4 * k)), "=r"(word(4 * k + 1)), "=r"(word(4 * k + 2)), "=r"(word(4 * k + 3))
                   : "r"(address)
                   : "memory");
    }
  }

  /// Starts the product for the logits of the query tile's first key tile. If the product reads Q from registers, first
  /// loads Q from its buffer in shared memory. This buffer is free once the wgmma is issued, because the wgmma waits
  /// for the registers of Q.
  CUTE_DEVICE void start_first_logits() {
    if constexpr (Traits::kQueryInRegisters) load_query();
    start_logits();
    if constexpr (Traits::kQueryInRegisters) arrive(shared.empty_q);
  }

  CUTE_DEVICE void start_logits() {
    order.await_turn();
    products.start_s(k.index);
    order.pass_turn();
  }

  /// Adds the weighted values of a key tile to the output. If `kHasNext`, also starts the product for the logits of the
  /// next tile, as soon as the registers for these logits are free.
  template <bool kHasNext>
  CUTE_DEVICE void exchange() {
    constexpr int kParts = Traits::kValueParts, kSets = Products::kSets, kLogitsStep = Products::kLogitsStep;
    await_values();
    for_each(make_int_sequence<kParts + kSets>{}, [&](auto number) {
      constexpr int kStep = number, kAdded = kStep - kSets;
      if constexpr (kAdded >= 0 && kAdded < kParts) {
        constexpr int kLaterParts = (kStep < kParts ? kStep : kParts) - kAdded - 1;
        warpgroup_wait<kLaterParts + (kHasNext && kLogitsStep < kStep ? 1 : 0)>();
        products.add_part(kAdded, softmax.rescale);
      }
      if constexpr (kStep < kParts) products.start_o(kStep, v.index);
      if constexpr (kHasNext && kStep == kLogitsStep) products.start_s(k.index);
    });
    release_values();
  }

  /// Releases the buffer of the key tile whose logits are complete.
  CUTE_DEVICE void release_logits() {
    Tensor s = products.s();
    warpgroup_fence_operand(s);
    release_keys();
    --left;
    release_query();
  }

  /// Computes the weights from the logits, as the register operand of the product with the values.
  CUTE_DEVICE void to_weights() {
    Tensor s = products.s();
    Tensor words = recast<std::uint32_t>(products.weights);
    if (mask == kNoMask) {
      softmax.weigh<false>(AccumulatorRows(s), words, mask_of_rows.visible);
    } else {
      softmax.weigh<true>(AccumulatorRows(s), words, mask_of_rows.visible);
    }
    mask = next_mask;
  }

  /// Completes the query tile whose plan is in slot `finished`: passes its output to the warp that stores it, and
  /// resets the output and the softmax for the next query tile.
  CUTE_DEVICE void finish_query_tile(int finished) {
    const TilePlan& plan = shared.plan[finished];
    const float factor = p.out_scales == nullptr ? 1.f : __ldg(p.out_scales + plan.batch * p.heads + plan.head);
    softmax.finish();
    const RowSums sums = softmax.sums();
    float normalisation[2];
    share_with_row(sums.normalisation * factor, normalisation);
    store_output(normalisation);
    store_statistics(p, plan, mask_of_rows, sums);
    arrive(shared.empty_plan[finished]);
    start_output();
  }

  /// Writes the output tile to shared memory. The accumulator's columns have the order of the features (elements of a
  /// head) in transposed value tiles (`transpose_tile`). In this order, a thread holds four consecutive features of
  /// every 16.
  CUTE_DEVICE void store_output(const float (&normalisation)[2]) {
    output.wait_empty(shared.empty_o);
    output.advance();
    const int lane4 = threadIdx.x % 4, row = first_row();
    const std::uint32_t tile = shared_address(shared.o);
    const auto& o = products.o;
    CUTE_UNROLL
    for (int group = 0; group < Traits::kHeadDim / 16; ++group) {
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) {
        const float scale = normalisation[i];
        const auto number = [&](int feature) { return o(8 * group + feature % 2 * 4 + 2 * i + feature / 2) * scale; };
        const std::uint32_t low = pack_output(number(0), number(1)), high = pack_output(number(2), number(3));
        const int chunk = group % 4 * 2 + lane4 / 2;
        const std::uint32_t at =
            tile + (group / 4 * Traits::kRows + row + 8 * i) * kSwizzledRow + 16 * (chunk ^ row % 8) + 8 * (lane4 % 2);
        asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(at), "r"(low), "r"(high) : "memory");
      }
    }
    cutlass::arch::fence_view_async_shared();
    cutlass::arch::NamedBarrier::arrive(Traits::kConsumers + kWarp, named_barrier(kOutputReady));
  }

  CUTE_DEVICE std::uint32_t pack_output(float low, float high) const {
    return p.is_out_float16 ? pack<cutlass::half_t>(low, high) : pack<cutlass::bfloat16_t>(low, high);
  }

  Products products;
  Float8Softmax softmax;
};

}  // namespace natten_jax::sm90
