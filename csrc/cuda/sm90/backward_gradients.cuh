// Work of the consumer warpgroups of the backward kernel: computation of the gradients.
#pragma once

#include "cuda/common/arithmetic.cuh"
#include "cuda/sm90/backward_key_bias.cuh"
#include "cuda/sm90/backward_products.cuh"
#include "cuda/sm90/wgmma.cuh"
#include "natten_jax/logsumexp.h"

namespace natten_jax::sm90 {

/// Writes a warpgroup's part of a dQ tile to shared memory, in the swizzled layout that TMA reads.
///
/// If all lanes wrote their columns in the same order, two lanes whose rows differ by one would write to the same
/// banks. So lanes with odd rows use another order.
template <int kRows, class Accumulator>
CUTE_DEVICE void write_sums(const Accumulator& sums, std::uint32_t tile, int thread) {
  const int lane = thread % 32, row = thread / 32 * 16 + lane / 4;
  const bool is_odd = row % 2 == 1;
  const std::uint32_t unit = lane % 4 / 2 ^ lane / 4;
  std::uint32_t first = tile + row * 128 + unit * 16 + lane % 2 * 8;
  first ^= is_odd ? 64 : 0;
  CUTE_UNROLL
  for (int e = 0; e < size(sums); e += 4) {
    // A chunk has four blocks of eight columns. Lanes with odd rows write the last two blocks first.
    const int block = e / 4, chunk = block / 4, in_chunk = block % 4;
    const int other = e + (in_chunk < 2 ? 8 : -8);
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      const float x = is_odd ? sums(other + 2 * i) : sums(e + 2 * i);
      const float y = is_odd ? sums(other + 2 * i + 1) : sums(e + 2 * i + 1);
      asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"((first ^ in_chunk * 32) + (chunk * kRows + 8 * i) * 128),
                   "f"(x), "f"(y)
                   : "memory");
    }
  }
}

/// Work of one consumer warpgroup: half of the logits and half of each gradient.
///
/// `run` processes all key/value tiles of the CTA. The other methods are its steps. For each query tile, they start
/// five matrix products asynchronously and wait for them later, in the only order for which there are enough registers.
/// All methods are inlined, so that members stay in registers.
template <class Traits>
class Differentiation {
 public:
  using Element = typename Traits::Element;
  using SharedStorage = typename Traits::SharedStorage;
  using Plan = KeyTilePlan<Traits::kKeys>;
  using Products = GradientProducts<Traits>;

  CUTE_DEVICE Differentiation(const BackwardParams& p, SharedStorage& shared)
      : p(p),
        shared(shared),
        part{cutlass::canonical_warp_group_idx() - 1, static_cast<int>(threadIdx.x % 128)},
        products(shared, part),
        row0(part.row_block() * 64 + part.thread / 32 * 16 + threadIdx.x % 32 / 4),
        lane4(threadIdx.x % 4) {}

  CUTE_DEVICE void run() {
    cutlass::arch::NamedBarrier::sync(kConsumers, named_barrier(kTablesReady));
    while (true) {
      slot.wait_full(shared.full_windows);
      const Plan& plan = shared.plan[slot.index];
      if (plan.q_tiles < 0) return;
      exponent_scale = plan.scale * kLog2E;
      const int tiles = plan.q_tiles * p.heads_per_kv;
      clear(products.dk);
      clear(products.dv);
      if constexpr (Traits::kHasKeyBias) start_biases(plan, 0);  // while K and V are loaded
      kv.wait_full(shared.full_k);
      kv.wait_full(shared.full_v);
      if constexpr (Traits::kHasKeyBias) {
        for (int i = 0; i < p.heads_per_kv; ++i) {
          if (i > 0) start_biases(plan, i);
          for (int tile = 0; tile < plan.q_tiles; ++tile, ++count) add_query_tile(plan, i == 0 && tile == 0);
          biases.store(p, shared, row0, plan.kv_head * p.heads_per_kv + i);
        }
      } else {
        for (int tile = 0; tile < tiles; ++tile, ++count) add_query_tile(plan, tile == 0);
      }
      arrive_as_warp(shared.empty_kv);
      store_gradients(plan.scale);
      kv.advance();
      arrive(shared.empty_plan[slot.index]);
      slot.advance();
    }
  }

 private:
  static constexpr int kStages = Traits::kStages;
  static constexpr bool kSplitsKeys = Traits::kSplitsKeys;

  /// Index of the buffer of the current query tile, and parity of the phase of the buffer's barriers.
  CUTE_DEVICE int stage() const { return count % kStages; }
  CUTE_DEVICE int phase() const { return count / kStages % 2; }
  CUTE_DEVICE int score_buffer() const { return count % Traits::kScoreBuffers; }
  /// True if this warpgroup computes dQ of the current query tile, or a part of it.
  CUTE_DEVICE bool computes_dq() const { return !Traits::kAlternates || count % 2 == part.warpgroup; }

  /// Pointer to pairs of elements of `query_values`. For every multiple e of 4, the pair at index e belongs to the two
  /// columns of the thread's accumulator elements e to e + 3.
  CUTE_DEVICE const float2* column_pairs(const float (&query_values)[Traits::kQueries]) const {
    return reinterpret_cast<const float2*>(query_values) + part.column_block() * (Products::kLogitColumns / 2) + lane4;
  }

  /// Tensor view of a tile in shared memory, for writes. It swizzles addresses instead of offsets, so a partition of it
  /// can start at any offset.
  template <class Layout>
  CUTE_DEVICE static auto writable(Element* tile, Layout layout) {
    return as_position_independent_swizzle_tensor(make_tensor(make_smem_ptr(tile), layout));
  }

  /// Loads the key biases for the `i`th query head of the tile.
  CUTE_DEVICE void start_biases(const Plan& plan, int i) {
    biases.start(p, plan, shared.row_coordinates, row0, plan.kv_head * p.heads_per_kv + i);
  }

  /// Adds the contributions of the current query tile to dK and dV, and computes its dQ.
  CUTE_DEVICE void add_query_tile(const Plan& plan, bool is_first) {
    if constexpr (Traits::kHasKeyBias) products.start_at(biases.in_products);
    wait(shared.full_q[stage()], phase());
    products.start_s(stage(), p.head_dim);
    wait(shared.full_out_cotangent[stage()], phase());
    products.start_ds(stage(), p.head_dim_v);
    // Computes the mask while the tensor cores compute the products.
    const int4 at = shared.tile[stage()];
    const bool is_masked = (at.w & kIsMasked) != 0;
    std::uint32_t visible[2];
    if (is_masked) set_visible(plan, at, visible);
    warpgroup_wait<1>();
    warpgroup_fence_operand(products.s);
    to_weights((at.w & kIsLarge) != 0);
    if (is_masked) AccumulatorRows(products.s).replace_masked(visible, 0.f);
    pack_weights();
    if constexpr (kSplitsKeys) {
      products.start_sum(products.weights, products.out_cotangents_t(_, _, _, stage()), products.dv);
      warpgroup_wait<1>();
    } else {
      write_scores(products.weights, shared.weights, 0);
      warpgroup_wait<0>();
    }
    warpgroup_fence_operand(products.ds);
    differentiate_weights();
    if (is_first) kv.wait_empty(shared.empty_gradients);
    write_scores(products.score_gradients, shared.score_gradient[0], score_buffer());
    cutlass::arch::fence_view_async_shared();
    cutlass::arch::NamedBarrier::sync(kConsumers, named_barrier(kScoresReady));
    accumulate_gradients();
  }

  /// Sets `visible` to a mask for each of the thread's two rows, with a bit per element. A bit is set if the query
  /// attends to the key.
  CUTE_DEVICE void set_visible(const Plan& plan, int4 at, std::uint32_t (&visible)[2]) const {
    const QueryColumnMask column_mask(shared.mask_words, p.axis);
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int4* window = plan.row_windows[row0 + 8 * i];
      visible[i] = column_mask.row(p.axis, window[0], window[1], at, lane4) >>
                   part.column_block() * (Products::kLogitColumns / 4);
    }
  }

  CUTE_DEVICE void to_weights(bool is_large) {
    auto& s = products.s;
    const float2* logsumexp = column_pairs(shared.logsumexp[stage()]);
    if (__builtin_expect(is_large, 0)) {
      const float2* remainder = column_pairs(shared.remainder[stage()]);
      CUTE_UNROLL
      for (int e = 0; e < size(s); e += 4) {
        const float2 lse_pair = logsumexp[e], less = remainder[e];
        s(e) = weight_of_large(s(e), exponent_scale, lse_pair.x, less.x);
        s(e + 1) = weight_of_large(s(e + 1), exponent_scale, lse_pair.y, less.y);
        s(e + 2) = weight_of_large(s(e + 2), exponent_scale, lse_pair.x, less.x);
        s(e + 3) = weight_of_large(s(e + 3), exponent_scale, lse_pair.y, less.y);
      }
    } else {
      CUTE_UNROLL
      for (int e = 0; e < size(s); e += 4) {
        const float2 lse_pair = logsumexp[e];
        s(e) = fast_exp2(s(e) * exponent_scale - lse_pair.x);
        s(e + 1) = fast_exp2(s(e + 1) * exponent_scale - lse_pair.y);
        s(e + 2) = fast_exp2(s(e + 2) * exponent_scale - lse_pair.x);
        s(e + 3) = fast_exp2(s(e + 3) * exponent_scale - lse_pair.y);
      }
    }
  }

  CUTE_DEVICE void pack_weights() {
    const auto& s = products.s;
    Tensor pairs = recast<std::uint32_t>(products.weights);
    CUTE_UNROLL
    for (int e = 0; e < size(pairs); ++e) pairs(e) = pack<Element>(s(2 * e), s(2 * e + 1));
  }

  /// Computes dS from the weights and their gradients.
  CUTE_DEVICE void differentiate_weights() {
    const auto& s = products.s;
    const auto& ds = products.ds;
    const float2* delta = column_pairs(shared.delta[stage()]);
    Tensor pairs = recast<std::uint32_t>(products.score_gradients);
    CUTE_UNROLL
    for (int e = 0; e < size(s); e += 4) {
      const float2 delta_pair = delta[e];
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) {
        const float x = s(e + 2 * i) * (ds(e + 2 * i) - delta_pair.x);
        const float y = s(e + 2 * i + 1) * (ds(e + 2 * i + 1) - delta_pair.y);
        pairs(e / 2 + i) = pack<Element>(x, y);
        if constexpr (Traits::kHasKeyBias) biases.sum[i] += x + y;
      }
    }
  }

  CUTE_DEVICE void write_scores(const typename Products::Operand& operand, Element* tile, int buffer) const {
    using Copy = Copy_Atom<SM90_U32x4_STSM_N, Element>;
    const auto copy_s = make_tiled_copy_C(Copy{}, typename Products::ProductS{}).get_thread_slice(part.thread);
    const Tensor to =
        copy_s.partition_D(local_tile(writable(tile, typename Products::ScoreRows{}),
                                      Shape<_64, Int<Products::kLogitColumns>, Int<Traits::kScoreBuffers>>{},
                                      make_coord(part.row_block(), part.column_block(), _0{})));
    const Tensor as_accumulator = make_tensor(operand.data(), products.s.layout());
    copy(Copy{}, copy_s.retile_S(as_accumulator), to(_, _, _, buffer));
  }

  /// Starts the remaining products of a query tile, waits for their results, and writes dQ to shared memory. Both
  /// warpgroups must have written dS.
  CUTE_DEVICE void accumulate_gradients() {
    if constexpr (kSplitsKeys) {
      if (computes_dq()) products.start_dq(score_buffer());
      products.start_sum(products.score_gradients, products.queries_t(_, _, _, stage()), products.dk);
    } else {
      products.start_sum(products.in_shared(shared.weights, part), products.out_cotangents_t(_, _, _, stage()),
                         products.dv);
      products.start_dq(score_buffer());
      products.start_sum(products.in_shared(shared.score_gradient[0], part), products.queries_t(_, _, _, stage()),
                         products.dk);
    }
    warpgroup_wait<1>();
    warpgroup_fence_operand(products.dv);
    arrive_as_warp(shared.empty_out_cotangent[stage()]);
    if (computes_dq()) {
      warpgroup_fence_operand(products.dq);
      wait(shared.empty_sums, count % 2 ^ 1);
      write_sums<Traits::kQueries>(products.dq, sums(), part.thread);
      cutlass::arch::fence_view_async_shared();
      arrive_as_warp(shared.full_sums);
    }
    // Waits for dK, because there are too few registers to start the next query tile while this product runs.
    warpgroup_wait<0>();
    warpgroup_fence_operand(products.dk);
    arrive(shared.empty_q[stage()]);
    if constexpr (Traits::kScoreBuffers == 1) {
      cutlass::arch::NamedBarrier::sync(kConsumers, named_barrier(kScoresRead));
    }
  }

  /// Address of the warpgroup's part of the dQ tile in shared memory.
  CUTE_DEVICE std::uint32_t sums() const {
    constexpr int kBytes = Products::kSumColumns * Traits::kQueries * sizeof(float);
    return cast_smem_ptr_to_uint(shared.query_gradient) + part.sum_block() * kBytes;
  }

  /// Writes dK and dV to shared memory, over the buffers of dS and dQ. Another warp copies them to global memory while
  /// the next tile is loaded.
  CUTE_DEVICE void store_gradients(float scale) {
    kv.wait_empty(shared.empty_gradients);
    wait(shared.empty_sums, count % 2 ^ 1);
    cutlass::arch::NamedBarrier::sync(kConsumers, named_barrier(kGradientsDone));
    store(products.dk, shared.key_gradient(), scale);
    store(products.dv, shared.value_gradient(), 1.f);
    cutlass::arch::fence_view_async_shared();
    arrive_as_warp(shared.full_gradients);
  }

  CUTE_DEVICE void store(const typename Products::Gradient& sum, Element* tile, float factor) const {
    using Copy = Copy_Atom<SM90_U32x4_STSM_N, Element>;
    Tensor result = make_tensor<Element>(sum.layout());
    Tensor pairs = recast<std::uint32_t>(result);
    CUTE_UNROLL
    for (int e = 0; e < size(pairs); ++e) pairs(e) = pack<Element>(sum(2 * e) * factor, sum(2 * e + 1) * factor);
    const auto copy_kv = make_tiled_copy_C(Copy{}, Traits::kv_product()).get_thread_slice(part.thread);
    const auto to =
        local_tile(writable(tile, typename Products::KeyRows{}), Shape<_64, Int<Products::kGradientColumns>, _1>{},
                   make_coord(part.row_block(), part.column_block(), _0{}));
    copy(Copy{}, copy_kv.retile_S(result), copy_kv.partition_D(to)(_, _, _, _0{}));
  }

  const BackwardParams& p;
  SharedStorage& shared;
  typename Products::Part part;
  Products products;
  std::conditional_t<Traits::kHasKeyBias, RowBiases<Traits>, std::nullptr_t> biases;
  int row0, lane4;  // the thread's two rows of the logits are row0 and row0 + 8
  float exponent_scale;
  int count = 0;  // number of query tiles processed so far, which determines the stage and phase of the rings
  SingleBuffer kv;
  Ring<2> slot;
};

}  // namespace natten_jax::sm90
