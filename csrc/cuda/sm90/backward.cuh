// Backward neighborhood attention for Hopper.
//
// A CTA owns a key/value tile and walks over the query tiles that see it, for every query head of the group. Logits
// and their gradients are computed transposed, keys in rows, so that they are register operands of the products that
// sum up the key and value gradients. The gradients of the logits also go to shared memory, whence both warpgroups
// compute a part of the query gradient, which is added to float32 sums in global memory by the copy engine.
//
// One file, since nothing but this kernel uses its parts, and most of it is the one schedule of `differentiate`.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "cuda/sm90/backward_pipeline.cuh"
#include "natten_jax/logsumexp.h"

namespace natten_jax::sm90 {

/// Writes a warpgroup's part of the query gradient, swizzled as the copy engine takes it.
///
/// Two lanes whose rows differ by one would write to the same banks: the odd rows write their columns in another order.
template <int kRows, class Accumulator>
CUTE_DEVICE void write_sums(const Accumulator& sums, std::uint32_t tile, int thread) {
  const int lane = thread % 32, row = thread / 32 * 16 + lane / 4;
  const bool is_odd = row % 2 == 1;
  const std::uint32_t unit = lane % 4 / 2 ^ lane / 4;
  std::uint32_t first = tile + row * 128 + unit * 16 + lane % 2 * 8;
  first ^= is_odd ? 64 : 0;
  CUTE_UNROLL
  for (int e = 0; e < size(sums); e += 4) {
    // Blocks of eight columns: each of the first two of a chunk changes places with the one after next.
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

/// One warpgroup: half of the logits and of each gradient.
///
/// One function, since five products of a tile share its registers, which suffice for one order of their waits.
template <class Traits>
CUTE_DEVICE void differentiate(const BackwardParams& p, typename Traits::SharedStorage& shared) {
  using Element = typename Traits::Element;
  constexpr int kHeadDim = Traits::kHeadDim, kKeys = Traits::kKeys, kQueries = Traits::kQueries;
  constexpr int kStages = Traits::kStages, kScoreBuffers = Traits::kScoreBuffers;
  constexpr auto kRowsFirst = GMMA::Major::MN, kRowsLast = GMMA::Major::K;
  // The warpgroups split the keys or, where there are only 64, the queries of the logits and the columns of the key and
  // value gradients. They split the columns of the query gradient or, where those are few, alternate with whole ones.
  constexpr bool kSplitsKeys = Traits::kSplitsKeys, kAlternates = Traits::kAlternates;
  constexpr int kLogitColumns = kSplitsKeys ? kQueries : kQueries / 2;
  constexpr int kGradientColumns = kSplitsKeys ? kHeadDim : kHeadDim / 2;
  constexpr int kSumColumns = kAlternates ? kHeadDim : kHeadDim / 2;
  const int thread = threadIdx.x % 128;
  const int warpgroup = cutlass::canonical_warp_group_idx() - 1;
  const int row_block = kSplitsKeys ? warpgroup : 0, column_block = kSplitsKeys ? 0 : warpgroup;
  const int lane4 = threadIdx.x % 4;
  const int row0 = row_block * 64 + thread / 32 * 16 + threadIdx.x % 32 / 4;  // and row0 + 8

  const auto part = [](Element* tile, auto layout, auto shape, int row, int column) {
    return local_tile(make_tensor(make_smem_ptr(tile), layout), shape, make_coord(row, column, _0{}));
  };
  // Parts of it may start anywhere: the swizzle follows the address.
  const auto writable = [](Element* tile, auto layout) {
    return as_position_independent_swizzle_tensor(make_tensor(make_smem_ptr(tile), layout));
  };
  using KeyRows = typename Traits::template Rows<kKeys, kHeadDim, 1>;
  using KeyColumns = typename Traits::template Columns<kKeys, kHeadDim, 1>;
  using QueryRows = typename Traits::template Rows<kQueries, kHeadDim, kStages>;
  using QueryColumns = typename Traits::template Columns<kQueries, kHeadDim, kStages>;
  using ScoreRows = typename Traits::template Rows<kKeys, kQueries, kScoreBuffers>;
  using ScoreColumns = typename Traits::template Columns<kKeys, kQueries, kScoreBuffers>;
  using QueryPart = Shape<Int<kLogitColumns>, Int<kHeadDim>, Int<kStages>>;
  using GradientPart = Shape<Int<kGradientColumns>, Int<kQueries>, Int<kStages>>;

  // Logits and the gradient of the weights; key and value gradients; query gradient.
  auto product_s =
      make_tiled_mma(GMMA::ss_op_selector<Element, Element, float, Shape<_64, Int<kLogitColumns>, Int<kHeadDim>>,
                                          kRowsLast, kRowsLast>());
  auto product_kv = Traits::kv_product();
  auto product_q =
      make_tiled_mma(GMMA::ss_op_selector<Element, Element, float, Shape<_64, Int<kSumColumns>, Int<kKeys>>, kRowsFirst,
                                          kRowsFirst>());
  const auto thread_s = product_s.get_thread_slice(thread);
  const auto thread_kv = product_kv.get_thread_slice(thread);
  const auto thread_q = product_q.get_thread_slice(thread);
  const auto key_part = [&](Element* tile) {
    return part(tile, KeyRows{}, Shape<_64, Int<kHeadDim>, _1>{}, row_block, 0);
  };
  const Tensor keys = thread_s.partition_fragment_A(key_part(shared.k));
  const Tensor values = thread_s.partition_fragment_A(key_part(shared.v));
  const Tensor queries = thread_s.partition_fragment_B(part(shared.q[0], QueryRows{}, QueryPart{}, column_block, 0));
  const Tensor out_cotangents =
      thread_s.partition_fragment_B(part(shared.out_cotangent[0], QueryRows{}, QueryPart{}, column_block, 0));
  const Tensor queries_t =
      thread_kv.partition_fragment_B(part(shared.q[0], QueryColumns{}, GradientPart{}, column_block, 0));
  const Tensor out_cotangents_t =
      thread_kv.partition_fragment_B(part(shared.out_cotangent[0], QueryColumns{}, GradientPart{}, column_block, 0));
  const Tensor scores_t = thread_q.partition_fragment_A(
      part(shared.score_gradient[0], ScoreColumns{}, Shape<_64, Int<kKeys>, Int<kScoreBuffers>>{}, 0, 0));
  const Tensor keys_t = thread_q.partition_fragment_B(
      part(shared.k, KeyColumns{}, Shape<Int<kSumColumns>, Int<kKeys>, _1>{}, kAlternates ? 0 : warpgroup, 0));
  Tensor s = partition_fragment_C(product_s, Shape<_64, Int<kLogitColumns>>{});
  Tensor ds = partition_fragment_C(product_s, Shape<_64, Int<kLogitColumns>>{});
  Tensor dk = partition_fragment_C(product_kv, Shape<_64, Int<kGradientColumns>>{});
  Tensor dv = partition_fragment_C(product_kv, Shape<_64, Int<kGradientColumns>>{});
  Tensor dq = partition_fragment_C(product_q, Shape<_64, Int<kSumColumns>>{});
  // Element for element, the accumulator of one product is the register operand of the next.
  const auto operand_layout = Layout<Shape<Shape<_2, _2, _2>, _1, Int<kLogitColumns / 16>>>{};
  Tensor weights = make_tensor<Element>(operand_layout);
  Tensor score_gradients = make_tensor<Element>(operand_layout);

  const auto copy_s = make_tiled_copy_C(Copy_Atom<SM90_U32x4_STSM_N, Element>{}, product_s).get_thread_slice(thread);
  const auto write_scores = [&](const auto& operand, Element* tile, int buffer) __attribute__((always_inline)) {
    const Tensor to =
        copy_s.partition_D(local_tile(writable(tile, ScoreRows{}), Shape<_64, Int<kLogitColumns>, Int<kScoreBuffers>>{},
                                      make_coord(row_block, column_block, _0{})));
    const Tensor as_accumulator = make_tensor(operand.data(), s.layout());
    copy(Copy_Atom<SM90_U32x4_STSM_N, Element>{}, copy_s.retile_S(as_accumulator), to(_, _, _, buffer));
  };
  const std::uint32_t sums = cast_smem_ptr_to_uint(shared.query_gradient) +
                             (kAlternates ? 0 : warpgroup * int{kSumColumns * kQueries * sizeof(float)});

  const QueryColumnMask column_mask(shared.mask_words, p.axis);
  cutlass::arch::NamedBarrier::sync(kConsumers, named_barrier(kTablesReady));

  const float exponent_scale = p.scale * kLog2E;
  // Query tiles so far, which say where in the rings of buffers this warpgroup is.
  int count = 0;
  const auto stage_of = [](int tile) { return tile % kStages; };
  const auto phase_of = [](int tile) { return tile / kStages % 2; };
  int kv_phase = 0, slot = 0, plan_phase = 0;
  while (true) {
    wait(shared.full_windows[slot], plan_phase);
    const auto& plan = shared.plan[slot];
    if (plan.q_tiles < 0) break;
    const int tiles = plan.q_tiles * p.heads_per_kv;
    clear(dk);
    clear(dv);

    const auto start_s = [&](int stage) __attribute__((always_inline)) {
      wait(shared.full_q[stage], phase_of(count));
      warpgroup_fence_operand(s);
      warpgroup_arrive();
      product_s.accumulate_ = GMMA::ScaleOut::Zero;
      CUTE_UNROLL
      for (int k = 0; k < size<2>(keys); ++k) {
        gemm(product_s, keys(_, _, k, _0{}), queries(_, _, k, stage), s);
        product_s.accumulate_ = GMMA::ScaleOut::One;
      }
      warpgroup_commit_batch();
    };
    const auto start_ds = [&](int stage) __attribute__((always_inline)) {
      wait(shared.full_out_cotangent[stage], phase_of(count));
      warpgroup_fence_operand(ds);
      warpgroup_arrive();
      product_s.accumulate_ = GMMA::ScaleOut::Zero;
      CUTE_UNROLL
      for (int k = 0; k < size<2>(values); ++k) {
        gemm(product_s, values(_, _, k, _0{}), out_cotangents(_, _, k, stage), ds);
        product_s.accumulate_ = GMMA::ScaleOut::One;
      }
      warpgroup_commit_batch();
    };
    const auto start_sum = [&](auto& sum, const auto& operand, const auto& tile) __attribute__((always_inline)) {
      warpgroup_fence_operand(sum);
      warpgroup_arrive();
      product_kv.accumulate_ = GMMA::ScaleOut::One;
      CUTE_UNROLL
      for (int k = 0; k < size<2>(operand); ++k) gemm(product_kv, operand(_, _, k), tile(_, _, k), sum);
      warpgroup_commit_batch();
    };
    const auto start_dq = [&](int buffer) __attribute__((always_inline)) {
      warpgroup_fence_operand(dq);
      warpgroup_arrive();
      product_q.accumulate_ = GMMA::ScaleOut::Zero;
      CUTE_UNROLL
      for (int k = 0; k < size<2>(scores_t); ++k) {
        gemm(product_q, scores_t(_, _, k, buffer), keys_t(_, _, k, _0{}), dq);
        product_q.accumulate_ = GMMA::ScaleOut::One;
      }
      warpgroup_commit_batch();
    };

    wait(shared.full_k, kv_phase);
    wait(shared.full_v, kv_phase);
    kv_phase ^= 1;
    for (int tile = 0; tile < tiles; ++tile, ++count) {
      const int stage = stage_of(count);
      start_s(stage);
      start_ds(stage);
      // Which elements of the tile are hidden, worked out while the products are under way.
      const int4 at = shared.tile[stage];
      const bool is_masked = (at.w & kIsMasked) != 0;
      std::uint32_t visible[2];
      if (is_masked) {
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) {
          const int4* seen_by = plan.row_windows[row0 + 8 * i];
          visible[i] = column_mask.row(p.axis, seen_by[0], seen_by[1], at, lane4) >> column_block * (kLogitColumns / 4);
        }
      }
      const auto* logsumexp =
          reinterpret_cast<const float2*>(shared.logsumexp[stage]) + column_block * (kLogitColumns / 2) + lane4;
      warpgroup_wait<1>();
      warpgroup_fence_operand(s);
      if (__builtin_expect(at.w & kIsLarge, 0)) {
        const auto* remainder =
            reinterpret_cast<const float2*>(shared.remainder[stage]) + column_block * (kLogitColumns / 2) + lane4;
        CUTE_UNROLL
        for (int e = 0; e < size(s); e += 4) {
          const float2 of_columns = logsumexp[e], less = remainder[e];
          s(e) = weight_of_large(s(e), exponent_scale, of_columns.x, less.x);
          s(e + 1) = weight_of_large(s(e + 1), exponent_scale, of_columns.y, less.y);
          s(e + 2) = weight_of_large(s(e + 2), exponent_scale, of_columns.x, less.x);
          s(e + 3) = weight_of_large(s(e + 3), exponent_scale, of_columns.y, less.y);
        }
      } else {
        CUTE_UNROLL
        for (int e = 0; e < size(s); e += 4) {
          const float2 of_columns = logsumexp[e];
          s(e) = fast_exp2(s(e) * exponent_scale - of_columns.x);
          s(e + 1) = fast_exp2(s(e + 1) * exponent_scale - of_columns.y);
          s(e + 2) = fast_exp2(s(e + 2) * exponent_scale - of_columns.x);
          s(e + 3) = fast_exp2(s(e + 3) * exponent_scale - of_columns.y);
        }
      }
      if (is_masked) {
        CUTE_UNROLL
        for (int e = 0; e < size(s); ++e) {
          const std::uint32_t bit = 1u << (2 * (e / 4) + e % 2);
          if (!(visible[(e / 2) % 2] & bit)) s(e) = 0.f;
        }
      }
      Tensor weight_pairs = recast<std::uint32_t>(weights);
      CUTE_UNROLL
      for (int e = 0; e < size(weight_pairs); ++e) weight_pairs(e) = pack<Element>(s(2 * e), s(2 * e + 1));
      if constexpr (kSplitsKeys) {
        start_sum(dv, weights, out_cotangents_t(_, _, _, stage));
        warpgroup_wait<1>();
      } else {
        write_scores(weights, shared.weights, 0);
        warpgroup_wait<0>();
      }
      warpgroup_fence_operand(ds);
      const auto* delta =
          reinterpret_cast<const float2*>(shared.delta[stage]) + column_block * (kLogitColumns / 2) + lane4;
      Tensor gradient_pairs = recast<std::uint32_t>(score_gradients);
      CUTE_UNROLL
      for (int e = 0; e < size(s); e += 4) {
        const float2 of_columns = delta[e];
        gradient_pairs(e / 2) = pack<Element>(s(e) * (ds(e) - of_columns.x), s(e + 1) * (ds(e + 1) - of_columns.y));
        gradient_pairs(e / 2 + 1) =
            pack<Element>(s(e + 2) * (ds(e + 2) - of_columns.x), s(e + 3) * (ds(e + 3) - of_columns.y));
      }
      if (tile == 0) wait(shared.empty_gradients, kv_phase);
      const int buffer = count % kScoreBuffers;
      write_scores(score_gradients, shared.score_gradient[0], buffer);
      cutlass::arch::fence_view_async_shared();
      cutlass::arch::NamedBarrier::sync(kConsumers, named_barrier(kScoresReady));

      const bool sums_up = !kAlternates || count % 2 == warpgroup;
      if constexpr (kSplitsKeys) {
        if (sums_up) start_dq(buffer);
        start_sum(dk, score_gradients, queries_t(_, _, _, stage));
      } else {
        const auto in_shared = [&](Element* tile) {
          return thread_kv.partition_fragment_A(make_tensor(make_smem_ptr(tile), ScoreRows{}))(_, _, _, _0{});
        };
        start_sum(dv, in_shared(shared.weights), out_cotangents_t(_, _, _, stage));
        start_dq(buffer);
        start_sum(dk, in_shared(shared.score_gradient[0]), queries_t(_, _, _, stage));
      }
      warpgroup_wait<1>();
      warpgroup_fence_operand(dv);
      arrive(shared.empty_out_cotangent[stage]);
      if (sums_up) {
        warpgroup_fence_operand(dq);
        wait(shared.empty_sums, count % 2 ^ 1);
        write_sums<kQueries>(dq, sums, thread);
        cutlass::arch::fence_view_async_shared();
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(shared.full_sums);
      }
      // Left under way, this product would need more registers than there are.
      warpgroup_wait<0>();
      warpgroup_fence_operand(dk);
      arrive(shared.empty_q[stage]);
      if constexpr (kScoreBuffers == 1) {
        cutlass::arch::NamedBarrier::sync(kConsumers, named_barrier(kScoresRead));
      }
    }

    if (threadIdx.x % 32 == 0) arrive(shared.empty_kv);

    // The gradients leave from where those of logits and query were, while the next tile is on its way.
    wait(shared.empty_gradients, kv_phase);
    wait(shared.empty_sums, count % 2 ^ 1);
    cutlass::arch::NamedBarrier::sync(kConsumers, named_barrier(kGradientsDone));
    const auto copy_kv =
        make_tiled_copy_C(Copy_Atom<SM90_U32x4_STSM_N, Element>{}, product_kv).get_thread_slice(thread);
    const auto store = [&](const auto& sum, Element* tile, float factor) __attribute__((always_inline)) {
      Tensor result = make_tensor<Element>(sum.layout());
      Tensor pairs = recast<std::uint32_t>(result);
      CUTE_UNROLL
      for (int e = 0; e < size(pairs); ++e) pairs(e) = pack<Element>(sum(2 * e) * factor, sum(2 * e + 1) * factor);
      const auto to = local_tile(writable(tile, KeyRows{}), Shape<_64, Int<kGradientColumns>, _1>{},
                                 make_coord(row_block, column_block, _0{}));
      copy(Copy_Atom<SM90_U32x4_STSM_N, Element>{}, copy_kv.retile_S(result), copy_kv.partition_D(to)(_, _, _, _0{}));
    };
    store(dk, shared.key_gradient(), p.scale);
    store(dv, shared.value_gradient(), 1.f);
    cutlass::arch::fence_view_async_shared();
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(shared.full_gradients);
    arrive(shared.empty_plan[slot]);
    advance<2>(slot, plan_phase);
  }
}

template <class Traits>
CUTE_DEVICE void prepare_backward(const BackwardParams& p, typename Traits::SharedStorage& shared) {
  if (p.clears_tiles) {
    // Rows and columns that no load reaches must be finite: their weights are zero.
    constexpr int kWords = offsetof(typename Traits::SharedStorage, weights) / sizeof(uint4);
    for (int i = threadIdx.x; i < kWords; i += kThreads) {
      reinterpret_cast<uint4*>(&shared)[i] = make_uint4(0, 0, 0, 0);
    }
    cutlass::arch::fence_view_async_shared();
  }
  // Rows past the key/value tile stand for its first; columns past the query tile are in no window.
  const auto place = [&](int i, int tokens, int y_extent, int z_extent, int x_past) {
    const int line = i / z_extent, x = line / y_extent;
    return make_uchar4(i < tokens ? x : x_past, i < tokens ? line - x * y_extent : 0,
                       i < tokens ? i - line * z_extent : 0, 0);
  };
  if (threadIdx.x < Traits::kKeys) {
    shared.row_coordinates[threadIdx.x] = place(threadIdx.x, p.kv_tile_tokens, p.axis[1].kv_tile, p.axis[2].kv_tile, 0);
  } else if (threadIdx.x - Traits::kKeys < Traits::kQueries) {
    shared.column_coordinates[threadIdx.x - Traits::kKeys] =
        place(threadIdx.x - Traits::kKeys, p.q_tile_tokens, p.axis[1].q_tile, p.axis[2].q_tile, 255);
  }
  if (threadIdx.x < 6) {
    shared.origins[threadIdx.x] = Origin::load(p.origins, threadIdx.x, p.axis[threadIdx.x % 3].dilation);
  }
  if (threadIdx.x == 0) {
    ClusterBarrier::init(&shared.full_k, 1);
    ClusterBarrier::init(&shared.full_v, 1);
    ClusterBarrier::init(&shared.empty_kv, kConsumerWarps);
    ClusterBarrier::init(&shared.full_gradients, kConsumerWarps);
    ClusterBarrier::init(&shared.empty_gradients, 1);
    ClusterBarrier::init(&shared.wants_plan, 1);
    ClusterBarrier::init(&shared.full_sums, Traits::kAlternates ? kConsumerWarps / 2 : kConsumerWarps);
    ClusterBarrier::init(&shared.empty_sums, 1);
    const int storing = p.turns == nullptr ? 1 : 32;
    for (int i = 0; i < 2; ++i) {
      ClusterBarrier::init(&shared.full_plan[i], 32);
      ClusterBarrier::init(&shared.full_windows[i], 32);
      ClusterBarrier::init(&shared.empty_plan[i], kConsumers + 32 + 1 + storing);  // and those that load
    }
    for (int i = 0; i < Traits::kStages; ++i) {
      ClusterBarrier::init(&shared.full_q[i], 1 + 32);  // one thread expects bytes, its warp writes
      ClusterBarrier::init(&shared.full_out_cotangent[i], 1);
      ClusterBarrier::init(&shared.empty_q[i], kConsumers);
      ClusterBarrier::init(&shared.empty_out_cotangent[i], kConsumers);
    }
    cutlass::arch::fence_barrier_init();
    for (const CUtensorMap* map : {&p.key[0], &p.query[0], &p.value[0], &p.out_cotangent[0], &p.query_gradient[0]}) {
      prefetch_tma_descriptor(map);
    }
  }
  __syncthreads();
}

template <class Traits>
__global__ void __launch_bounds__(kThreads, 1) natten_jax_sm90_backward(const __grid_constant__ BackwardParams p) {
  // No static shared memory: the dynamic part starts at a multiple of 1024 bytes, as the swizzle needs.
  extern __shared__ __align__(1024) char raw[];
  auto& shared = *reinterpret_cast<typename Traits::SharedStorage*>(raw);
  prepare_backward<Traits>(p, shared);
  if (threadIdx.x < 128) {
    const int warp = threadIdx.x / 32;
    // The first plan is made while there are registers for it.
    Planned planned{};
    if (warp == 1) planned = plan_position<Traits>(p, shared, take_position(p, true), 0);
    cutlass::arch::warpgroup_reg_dealloc<Traits::kMoverRegisters>();
    if (warp == 0) load_queries<Traits>(p, shared);
    if (warp == 1) plan_key_tiles<Traits>(p, shared, planned);
    if (threadIdx.x == 64) load_out_cotangents<Traits>(p, shared);
    if (warp == 3 && p.turns != nullptr) store_gradients_in_turns<Traits>(p, shared);
    if (threadIdx.x == 96 && p.turns == nullptr) store_gradients<Traits>(p, shared);
  } else {
    // While the other warpgroup still has its registers.
    const QueryColumnMask column_mask(shared.mask_words, p.axis);
    column_mask.template build<Traits::kQueries>(p.axis, threadIdx.x / 32 - kConsumerWarps / 2, kConsumerWarps);
    cutlass::arch::warpgroup_reg_alloc<Traits::kConsumerRegisters>();
    differentiate<Traits>(p, shared);
  }
}

}  // namespace natten_jax::sm90
