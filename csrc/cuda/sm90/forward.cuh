// Forward neighborhood attention for Hopper: TMA loads of multi-dimensional tiles from the natural layout, wgmma.
//
// The warps of the first warpgroup have one task each: load query and key tiles, plan tiles, load value tiles, store
// output tiles. Two or three more warpgroups own 64 query rows each: logits, online softmax in base 2, output.
// Key/value tiles start at the first key that the query tile's windows hold. A tile that every row sees whole is not
// masked; the others take one bit per element.
//
// One file, since nothing but this kernel uses its parts, and most of it is the one schedule of `attend`.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "cuda/sm90/forward_pipeline.cuh"
#include "cuda/sm90/online_softmax.cuh"

namespace natten_jax::sm90 {

constexpr int kOrderThreads = 2 * 128;  // of a warpgroup that has issued its products and the one that goes next

/// Where a row lies in the query tile.
struct RowPlace {
  // A byte per dimension: the index of its window in a plan; the last: whether the tile has such a row.
  std::uint32_t window_indices;

  /// Rows past the query tile stand for its first.
  CUTE_DEVICE RowPlace(const ForwardParams& p, int row) {
    const bool exists = row < p.q_tile_tokens;
    int line, x, y, z;
    p.axis[2].by_q_tile(line, z, exists ? row : 0);
    p.axis[1].by_q_tile(x, y, line);
    window_indices = x | (p.axis[0].q_tile + y) << 8 | (p.axis[0].q_tile + p.axis[1].q_tile + z) << 16 | exists << 24;
  }

  CUTE_DEVICE int2 window(const TilePlan& plan, int d) const { return plan.windows[byte(d)]; }

  /// The row's token, or -1.
  CUTE_DEVICE int token(const ForwardParams& p, const TilePlan& plan) const {
    const int coordinate[3] = {byte(0), byte(1) - p.axis[0].q_tile, byte(2) - p.axis[0].q_tile - p.axis[1].q_tile};
    int token = 0;
    bool is_inside = byte(3) != 0;
    CUTE_UNROLL
    for (int d = 0; d < 3; ++d) {
      // Past the dilation group, this may exceed 32 bits.
      const auto at =
          static_cast<std::int64_t>(plan.q_begin[d] + coordinate[d]) * p.axis[d].dilation + plan.query_residue[d];
      is_inside = is_inside && at < p.axis[d].query_local_extent;
      token = token * p.axis[d].query_local_extent + static_cast<int>(at);
    }
    return is_inside ? token : -1;
  }

 private:
  CUTE_DEVICE int byte(int i) const {
    std::uint32_t packed = window_indices;
    // Opaque, so that no register holds a byte from tile to tile.
    asm volatile("" : "+r"(packed));
    return packed >> 8 * i & 0xff;
  }
};

/// One warpgroup: the products and the softmax of its 64 rows of every query tile.
///
/// One function, since its steps share registers: accumulators that products under way write, and places in the rings.
template <class Traits>
CUTE_DEVICE void attend(const ForwardParams& p, typename Traits::SharedStorage& shared) {
  using Element = typename Traits::Element;
  constexpr int kColumns = Traits::kColumns;
  const int thread = threadIdx.x % 128;
  const int warpgroup = cutlass::canonical_warp_group_idx() - 1;
  const int lane4 = threadIdx.x % 4;
  const int row0 = warpgroup * 64 + thread / 32 * 16 + threadIdx.x % 32 / 4;  // and row0 + 8
  const RowPlace row[2] = {RowPlace(p, row0), RowPlace(p, row0 + 8)};

  Element* output_tile = Traits::kSeparateOutput ? shared.o : shared.q;
  const auto rows_of_group = [&](Element* tile) {
    return local_tile(make_tensor(make_smem_ptr(tile), typename Traits::LayoutQ{}), Shape<_64, Int<Traits::kHeadDim>>{},
                      make_coord(warpgroup, 0));
  };
  const Tensor sQ = rows_of_group(shared.q);
  const Tensor sO = rows_of_group(output_tile);
  auto product_s = Traits::query_key_product();
  auto product_o = Traits::weight_value_product();
  const auto thread_s = product_s.get_thread_slice(thread);
  const auto thread_o = product_o.get_thread_slice(thread);
  const Tensor keys = thread_s.partition_fragment_B(make_tensor(make_smem_ptr(shared.k), typename Traits::LayoutK{}));
  const Tensor values =
      thread_o.partition_fragment_B(make_tensor(make_smem_ptr(shared.v), typename Traits::LayoutVt{}));
  Tensor query = thread_s.partition_fragment_A(sQ);
  Tensor s = partition_fragment_C(product_s, Shape<_64, Int<kColumns>>{});
  Tensor o = partition_fragment_C(product_o, Shape<_64, Int<Traits::kHeadDim>>{});
  // Element for element, the accumulator of one product is the register operand of the next.
  Tensor weights = make_tensor<Element>(Layout<Shape<Shape<_2, _2, _2>, _1, Int<kColumns / 16>>>{});

  const KeyColumnMask column_mask(shared.mask_words, p.axis);
  column_mask.template build<kColumns>(p.axis, threadIdx.x / 32 - 4, Traits::kConsumers / 32);
  cutlass::arch::NamedBarrier::sync(Traits::kConsumers, named_barrier(kMaskReady));
  const LaneMask lane_mask(column_mask, lane4);

  // Negating the scale is negating the query; a scale of zero is a query of zero.
  const std::uint32_t query_flip = p.scale < 0.f ? 0x80008000u : 0u, query_keep = p.scale == 0.f ? 0u : 0xffffffffu;
  const float logit_sign = p.scale < 0.f ? -1.f : p.scale == 0.f ? 0.f : 1.f;
  const float exponent_scale = (p.scale == 0.f ? 1.f : fabsf(p.scale)) * kLog2E;
  OnlineSoftmax<Element> softmax;

  const auto await_turn = [&]() __attribute__((always_inline)) {
    if constexpr (Traits::kPingPong) {
      cutlass::arch::NamedBarrier::sync(kOrderThreads, named_barrier(kProductOrder + warpgroup));
    }
  };
  const auto pass_turn = [&]() __attribute__((always_inline)) {
    if constexpr (Traits::kPingPong) {
      const int next = warpgroup == Traits::kWarpgroups - 1 ? 0 : warpgroup + 1;
      cutlass::arch::NamedBarrier::arrive(kOrderThreads, named_barrier(kProductOrder + next));
    }
  };
  if (Traits::kPingPong && warpgroup == Traits::kWarpgroups - 1) pass_turn();  // the first warpgroup begins

  int k_stage = 0, k_phase = 0, v_stage = 0, v_phase = 0, q_phase = 0, o_phase = 0, slot = 0, plan_phase = 0;
  int left;             // key/value tiles of the query tile to go
  int mask, next_mask;  // of the tile at hand and of the one after it
  std::uint32_t visible[2];
  // What x and y leave visible in the tiles of a line along z, and the line's place.
  std::uint32_t of_line[2];
  int line_x, line_y;

  // Takes the next query tile; false after the last.
  const auto next_query_tile = [&]() __attribute__((always_inline)) {
    wait(shared.full_plan[slot], plan_phase);
    left = shared.plan[slot].kv_tiles;
    if (left < 0) return false;
    line_x = -1;
    left += (p.additional_kv + kColumns - 1) / kColumns;
    wait(shared.full_q, q_phase);
    q_phase ^= 1;
    if constexpr (Traits::kQueryInRegisters) {
      const auto copy_q = make_tiled_copy_A(Copy_Atom<SM75_U32x4_LDSM_N, Element>{}, product_s);
      const auto thread_copy = copy_q.get_thread_slice(thread);
      copy(copy_q, thread_copy.partition_S(as_position_independent_swizzle_tensor(sQ)), thread_copy.retile_D(query));
      Tensor pairs = recast<std::uint32_t>(query);
      CUTE_UNROLL
      for (int i = 0; i < size(pairs); ++i) pairs(i) = (pairs(i) ^ query_flip) & query_keep;
      arrive(shared.empty_q);
    }
    return true;
  };
  const auto start_s = [&]() __attribute__((always_inline)) {
    await_turn();
    warpgroup_fence_operand(s);
    warpgroup_arrive();
    product_s.accumulate_ = GMMA::ScaleOut::Zero;
    CUTE_UNROLL
    for (int k = 0; k < size<2>(query); ++k) {
      gemm(product_s, query(_, _, k), keys(_, _, k, k_stage), s);
      product_s.accumulate_ = GMMA::ScaleOut::One;
    }
    warpgroup_commit_batch();
  };
  const auto start_o = [&]() __attribute__((always_inline)) {
    wait(shared.full_v[v_stage], v_phase);
    warpgroup_fence_operand(o);
    warpgroup_arrive();
    product_o.accumulate_ = GMMA::ScaleOut::One;
    CUTE_UNROLL
    for (int k = 0; k < size<2>(weights); ++k) gemm(product_o, weights(_, _, k), values(_, _, k, v_stage), o);
    warpgroup_commit_batch();
  };
  // How the tile in a key buffer is masked for this warpgroup.
  const auto mask_of = [&](int stage, int phase) __attribute__((always_inline)) {
    wait(shared.full_k[stage], phase);
    return shared.tile[stage].w >> kMaskBits * warpgroup & kHidden;
  };
  // After the last key tile, the query's buffer is free.
  const auto leave_query = [&]() __attribute__((always_inline)) {
    if constexpr (Traits::kSeparateOutput && !Traits::kQueryInRegisters) {
      if (left == 0) arrive(shared.empty_q);
    }
  };
  // Passes over tiles that no row sees; false where no other is left.
  const auto find_seen = [&]() __attribute__((always_inline)) {
    while (left > 0) {
      mask = mask_of(k_stage, k_phase);
      if (mask != kHidden) return true;
      --left;
      leave_query();
      await_turn();
      pass_turn();
      arrive(shared.empty_k[k_stage]);
      advance<Traits::kStages>(k_stage, k_phase);
      wait(shared.full_v[v_stage], v_phase);
      arrive(shared.empty_v[v_stage]);
      advance<Traits::kStages>(v_stage, v_phase);
    }
    return false;
  };
  // Which elements of the tile are hidden and how the next tile is masked, worked out while the product is under way.
  const auto plan_mask = [&]() __attribute__((always_inline)) {
    const int4 tile = shared.tile[k_stage];
    if (mask == kWindowMask) {
      const TilePlan& plan = shared.plan[slot];
      if (tile.x != line_x || tile.y != line_y) {
        wait(shared.full_windows[slot], plan_phase);
        line_x = tile.x;
        line_y = tile.y;
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) {
          of_line[i] = lane_mask.between(0, p.axis[0].kv_tile, row[i].window(plan, 0), tile.x) &
                       lane_mask.between(1, p.axis[1].kv_tile, row[i].window(plan, 1), tile.y);
        }
      }
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) {
        visible[i] = of_line[i] & lane_mask.between(2, p.axis[2].kv_tile, row[i].window(plan, 2), tile.z);
      }
    } else if (mask == kEndMask) {
      visible[0] = visible[1] = KeyColumnMask::first(p.additional_kv - tile.z, lane4);
    }
    next_mask = kHidden;
    if (left > 1) {
      int stage = k_stage, phase = k_phase;
      advance<Traits::kStages>(stage, phase);
      next_mask = mask_of(stage, phase);
    }
  };
  const auto finish_s = [&]() __attribute__((always_inline)) {
    warpgroup_fence_operand(s);
    arrive(shared.empty_k[k_stage]);
    advance<Traits::kStages>(k_stage, k_phase);
    --left;
    leave_query();
    if (!Traits::kQueryInRegisters && logit_sign <= 0.f) {
      CUTE_UNROLL
      for (int e = 0; e < size(s); ++e) s(e) *= logit_sign;
    }
    if (mask != kNoMask) {
      CUTE_UNROLL
      for (int e = 0; e < size(s); ++e) {
        const std::uint32_t bit = 1u << (2 * (e / 4) + e % 2);
        if (!(visible[(e / 2) % 2] & bit)) s(e) = -INFINITY;
      }
    }
    mask = next_mask;
    softmax.find_references(s);
  };
  const auto finish_o = [&]() __attribute__((always_inline)) {
    warpgroup_fence_operand(o);
    arrive(shared.empty_v[v_stage]);
    advance<Traits::kStages>(v_stage, v_phase);
  };
  const auto to_weights = [&]() __attribute__((always_inline)) {
    Tensor pairs = recast<std::uint32_t>(weights);
    softmax.weigh(s, pairs);
    if (softmax.is_special()) {
      softmax.correct_weights(s, pairs);
      CUTE_UNROLL
      for (int e = 0; e < size(o); ++e) {
        const int row = (e / 2) % 2;
        o(e) *= softmax.must_rescale[row] ? softmax.rescale[row] : 1.f;
      }
    }
    softmax.add_weights();
  };
  // Hands over the output of the query tile in a slot and gets ready for the next.
  const auto finish_query_tile = [&](int finished) __attribute__((always_inline)) {
    softmax.finish();
    const float normalisation[2] = {softmax.normalisation(0), softmax.normalisation(1)};
    Tensor result = make_tensor<Element>(o.layout());
    Tensor pairs = recast<std::uint32_t>(result);
    CUTE_UNROLL
    for (int e = 0; e < size(pairs); ++e) {
      pairs(e) = pack<Element>(o(2 * e) * normalisation[e % 2], o(2 * e + 1) * normalisation[e % 2]);
    }
    // A tile of its own may still be on its way out; rows of the query are this warpgroup's to overwrite.
    if constexpr (Traits::kSeparateOutput) {
      wait(shared.empty_o, o_phase ^ 1);
      o_phase ^= 1;
    }
    const auto copy_o = make_tiled_copy_C(Copy_Atom<SM90_U32x4_STSM_N, Element>{}, product_o);
    const auto thread_copy = copy_o.get_thread_slice(thread);
    copy(copy_o, thread_copy.retile_S(result), thread_copy.partition_D(as_position_independent_swizzle_tensor(sO)));
    cutlass::arch::fence_view_async_shared();
    cutlass::arch::NamedBarrier::arrive(Traits::kConsumers + 32, named_barrier(kOutputReady));
    const TilePlan& plan = shared.plan[finished];
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int token = row[i].token(p, plan);
      if (lane4 == 0 && token >= 0) {
        const auto tokens = static_cast<std::int64_t>(p.axis[0].query_local_extent) * p.axis[1].query_local_extent *
                            p.axis[2].query_local_extent;
        const std::int64_t at = (plan.batch * tokens + token) * p.heads + plan.head;
        const float logsumexp = softmax.logsumexp(i);
        p.logsumexp[at] = logsumexp;
        if (p.remainder != nullptr) p.remainder[at] = softmax.remainder(i, logsumexp);
      }
    }
    arrive(shared.empty_plan[finished]);
    clear(o);
    softmax.start(exponent_scale);
  };

  clear(o);
  softmax.start(exponent_scale);
  if (!next_query_tile()) return;
  find_seen();
  start_s();
  pass_turn();
  warpgroup_wait<0>();  // entered and repeated, the loop keeps the logits in different registers
  int finished;
  while (true) {
    plan_mask();
    warpgroup_wait<0>();
    finish_s();
    to_weights();
    // The logits of one tile are under way with the output of the one before.
    while (mask != kHidden) {
      start_s();
      start_o();
      pass_turn();
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
    if (find_seen()) {
      start_s();
      pass_turn();
      continue;
    }
    finished = slot;
    advance<2>(slot, plan_phase);
    if constexpr (!Traits::kSeparateOutput) finish_query_tile(finished);
    if (!next_query_tile()) break;
    find_seen();
    start_s();
    pass_turn();
    // The next tile's first logits are under way meanwhile.
    if constexpr (Traits::kSeparateOutput) finish_query_tile(finished);
  }
  if constexpr (Traits::kSeparateOutput) finish_query_tile(finished);
}

template <class Traits>
CUTE_DEVICE void prepare(const ForwardParams& p, typename Traits::SharedStorage& shared) {
  if (p.clears_tiles) {
    // Rows and columns that no load reaches must be finite: their weights are zero.
    constexpr int kWords = offsetof(typename Traits::SharedStorage, o) / sizeof(uint4);
    for (int i = threadIdx.x; i < kWords; i += Traits::kThreads) {
      reinterpret_cast<uint4*>(&shared)[i] = make_uint4(0, 0, 0, 0);
    }
    cutlass::arch::fence_view_async_shared();
  }
  if (threadIdx.x >= 32 && threadIdx.x < 32 + kGroupClasses) {
    // The first loads need not wait for their maps.
    const int c = threadIdx.x - 32;
    if (p.query_classes >> c & 1) {
      cute::prefetch_tma_descriptor(reinterpret_cast<const cute::TmaDescriptor*>(&p.query[c]));
      cute::prefetch_tma_descriptor(reinterpret_cast<const cute::TmaDescriptor*>(&p.out[c]));
    }
    if (p.kv_classes >> c & 1) {
      cute::prefetch_tma_descriptor(reinterpret_cast<const cute::TmaDescriptor*>(&p.key[c]));
      cute::prefetch_tma_descriptor(reinterpret_cast<const cute::TmaDescriptor*>(&p.value[c]));
    }
  }
  if (threadIdx.x == 0) {
    ClusterBarrier::init(&shared.first_key_loaded, 1);
    ClusterBarrier::init(&shared.full_q, 1);
    ClusterBarrier::init(&shared.empty_q, Traits::kSeparateOutput ? Traits::kConsumers : 1);
    ClusterBarrier::init(&shared.empty_o, 1);
    for (int i = 0; i < 2; ++i) {
      ClusterBarrier::init(&shared.full_plan[i], 32);
      ClusterBarrier::init(&shared.full_windows[i], 32);
      ClusterBarrier::init(&shared.empty_plan[i],
                           Traits::kConsumers + 2 + 32);  // and two loading threads, a storing warp
    }
    for (int i = 0; i < Traits::kStages; ++i) {
      ClusterBarrier::init(&shared.full_k[i], 1);
      ClusterBarrier::init(&shared.full_v[i], 1);
      ClusterBarrier::init(&shared.empty_k[i], Traits::kConsumers);
      ClusterBarrier::init(&shared.empty_v[i], Traits::kConsumers);
    }
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    natten_jax_sm90_fna_forward(const __grid_constant__ ForwardParams p) {
  // No static shared memory: the dynamic part starts at a multiple of 1024 bytes, as the swizzle needs.
  extern __shared__ __align__(1024) char raw[];
  auto& shared = *reinterpret_cast<typename Traits::SharedStorage*>(raw);
  prepare<Traits>(p, shared);
  if (threadIdx.x < 128) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::kServiceRegisters>();
    const int warp = threadIdx.x / 32;
    if (threadIdx.x == 0) load_tiles<Traits, true>(p, shared);
    if (warp == 1) plan_tiles(p, shared);
    if (threadIdx.x == 64) load_tiles<Traits, false>(p, shared);
    if (warp == 3) store_tiles<Traits>(p, shared);
  } else {
    cutlass::arch::warpgroup_reg_alloc<Traits::kConsumerRegisters>();
    attend<Traits>(p, shared);
  }
}

}  // namespace natten_jax::sm90
