// Backward neighborhood attention for Hopper.
//
// A CTA owns a key/value tile and iterates over the query tiles that see it, for every query head of the group. S and
// dS are computed transposed, with keys in rows, so that they are register operands of the products that accumulate dK
// and dV. dS is also written to shared memory, from which both warpgroups compute a part of dQ. TMA adds dQ to float32
// sums in global memory.
//
// Three warps of the first warpgroup plan and load tiles (backward_load.cuh), the fourth accumulates dQ and stores dK
// and dV (backward_store.cuh). The two other warpgroups compute (backward_gradients.cuh).
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "cuda/sm90/backward_gradients.cuh"
#include "cuda/sm90/backward_load.cuh"
#include "cuda/sm90/backward_store.cuh"

namespace natten_jax::sm90 {

template <class Traits>
CUTE_DEVICE void prepare_backward(const BackwardParams& p, typename Traits::SharedStorage& shared) {
  if (p.clears_tiles) {
    // Rows that no load writes must be finite, because they are multiplied by weights of zero.
    constexpr int kWords = offsetof(typename Traits::SharedStorage, weights) / sizeof(uint4);
    for (int i = threadIdx.x; i < kWords; i += kThreads) {
      reinterpret_cast<uint4*>(&shared)[i] = make_uint4(0, 0, 0, 0);
    }
    cutlass::arch::fence_view_async_shared();
  }
  // Rows past the key/value tile get the coordinates of row 0; columns past the query tile are outside every window.
  const auto bytes = [](int3 at) { return make_uchar4(at.x, at.y, at.z, 0); };
  if (threadIdx.x < Traits::kKeys) {
    const int row = threadIdx.x < p.kv_tile_tokens ? threadIdx.x : 0;
    shared.row_coordinates[threadIdx.x] = bytes(place_in_tile<&DeviceAxis::by_kv_tile>(p.axis, row));
  } else if (threadIdx.x - Traits::kKeys < Traits::kQueries) {
    const int column = threadIdx.x - Traits::kKeys;
    const int3 place = Traits::kIsPlain || !p.q_boxes.go_around ? place_in_tile<&DeviceAxis::by_q_tile>(p.axis, column)
                                                                : place_in_boxes(p.q_boxes, column);
    shared.column_coordinates[column] = column < p.q_tile_tokens ? bytes(place) : make_uchar4(255, 0, 0, 0);
  }
  if (!Traits::kIsPlain && threadIdx.x < 6) {
    shared.origins[threadIdx.x] = Origin::load(p.origins, threadIdx.x, p.axis[threadIdx.x % 3].dilation);
  }
  if (threadIdx.x == 0) {
    shared.layout.entry = -1;
    ClusterBarrier::init(&shared.full_k, 1);
    ClusterBarrier::init(&shared.full_v, 1);
    ClusterBarrier::init(&shared.empty_kv, kConsumerWarps);
    ClusterBarrier::init(&shared.full_gradients, kConsumerWarps);
    ClusterBarrier::init(&shared.empty_gradients, 1);
    ClusterBarrier::init(&shared.wants_plan, 1);
    ClusterBarrier::init(&shared.full_sums, Traits::kAlternates ? kConsumerWarps / 2 : kConsumerWarps);
    ClusterBarrier::init(&shared.empty_sums, 1);
    const int storing = p.schedule.turns == nullptr ? 1 : kWarp;
    for (int i = 0; i < 2; ++i) {
      ClusterBarrier::init(&shared.full_plan[i], kWarp);
      ClusterBarrier::init(&shared.full_windows[i], kWarp);
      ClusterBarrier::init(&shared.empty_plan[i], kConsumers + 1 + kWarp + storing);  // and loaders
    }
    for (int i = 0; i < Traits::kStages; ++i) {
      ClusterBarrier::init(&shared.full_q[i], 1 + kWarp);  // one thread expects bytes, a warp writes
      ClusterBarrier::init(&shared.full_out_cotangent[i], 1);
      ClusterBarrier::init(&shared.empty_q[i], kConsumers);
      ClusterBarrier::init(&shared.empty_out_cotangent[i], kConsumerWarps);
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
  if (threadIdx.x < kWarpgroup) {
    const int warp = threadIdx.x / 32;
    // The first plan is made before the warpgroup releases registers.
    Planned planned{};
    if (warp == kPlansKeys) planned = plan_position<Traits>(p, shared, take_position(p, true), 0);
    cutlass::arch::warpgroup_reg_dealloc<Traits::kMoverRegisters>();
    if (threadIdx.x == kWarp * kLoadsQueries) load_query_tiles<Traits>(p, shared);
    if (warp == kPlansKeys) plan_key_tiles<Traits>(p, shared, planned);
    if (warp == kLoadsStatistics) load_statistics<Traits>(p, shared);
    if (warp == kStoresGradients && p.schedule.turns != nullptr) store_gradients<Traits, true>(p, shared);
    if (threadIdx.x == kWarp * kStoresGradients && p.schedule.turns == nullptr) {
      store_gradients<Traits, false>(p, shared);
    }
  } else {
    // The mask tables are built first, because `warpgroup_reg_alloc` waits for registers of the producer warpgroup.
    const QueryColumnMask column_mask(shared.mask_words, p.axis);
    column_mask.template build<Traits::kQueries>(p.axis, threadIdx.x / 32 - kConsumerWarps / 2, kConsumerWarps,
                                                 &p.q_boxes);
    cutlass::arch::warpgroup_reg_alloc<Traits::kConsumerRegisters>();
    Differentiation<Traits>(p, shared).run();
  }
}

}  // namespace natten_jax::sm90
