// Backward neighborhood attention for Hopper.
//
// A CTA processes a key/value tile at a time. For every query head that shares the tile's key/value head, it iterates
// over the query tiles that attend to (see) the keys of the tile.
//
// The CTA computes weights and dS transposed, with a row per key. With heads of up to 128, a thread then holds the
// elements of weights and dS that it needs as register operands of the products for dV and dK. With heads of 256,
// weights and dS pass through shared memory. The product for dQ always reads dS from shared memory. TMA adds dQ to
// float32 sums in global memory.
//
// In the first warpgroup, three warps plan and load tiles (backward_load.cuh). The fourth warp adds dQ to the sums and
// stores dK and dV (backward_store.cuh). The two other warpgroups compute the gradients (backward_gradients.cuh).
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "cuda/sm90/backward_gradients.cuh"
#include "cuda/sm90/backward_load.cuh"
#include "cuda/sm90/backward_store.cuh"

namespace natten_jax::sm90 {

template <class Traits>
CUTE_DEVICE void prepare_backward(const BackwardParams& p, typename Traits::SharedStorage& shared) {
  if (p.clears_tiles) {
    // Rows that no load writes are multiplied by weights of zero. They must be finite, so they are set to zero here.
    constexpr int kWords = offsetof(typename Traits::SharedStorage, weights) / sizeof(uint4);
    for (int i = threadIdx.x; i < kWords; i += kThreads) {
      reinterpret_cast<uint4*>(&shared)[i] = make_uint4(0, 0, 0, 0);
    }
    cutlass::arch::fence_view_async_shared();
  }
  // Rows past the key/value tile get the coordinates of row 0. Columns past the query tile get coordinates outside of
  // every window.
  const auto bytes = [](int3 at) { return make_uchar4(at.x, at.y, at.z, 0); };
  if (threadIdx.x < Traits::kKeys) {
    const int row = threadIdx.x < p.kv_tile_tokens ? threadIdx.x : 0;
    shared.row_coordinates[threadIdx.x] = bytes(position_in_tile<&DeviceAxis::by_kv_tile>(p.axis, row));
  } else if (threadIdx.x - Traits::kKeys < Traits::kQueries) {
    const int column = threadIdx.x - Traits::kKeys;
    const int3 position = Traits::kIsPlain || !p.q_boxes.has_seams
                              ? position_in_tile<&DeviceAxis::by_q_tile>(p.axis, column)
                              : position_in_boxes(p.q_boxes, column);
    shared.column_coordinates[column] = column < p.q_tile_tokens ? bytes(position) : make_uchar4(255, 0, 0, 0);
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
    const int storing = p.schedule.additions == nullptr ? 1 : kWarp;
    for (int i = 0; i < 2; ++i) {
      ClusterBarrier::init(&shared.full_plan[i], kWarp);
      ClusterBarrier::init(&shared.full_windows[i], kWarp);
      // Arrivals: consumers, the thread that loads dO, the warp that loads logsumexps, the threads that store
      // gradients.
      ClusterBarrier::init(&shared.empty_plan[i], kConsumers + 1 + kWarp + storing);
    }
    for (int i = 0; i < Traits::kStages; ++i) {
      // Arrivals: the thread that loads Q with TMA, and the lanes of the warp that writes logsumexps and deltas.
      ClusterBarrier::init(&shared.full_q[i], 1 + kWarp);
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
  // The swizzle requires that dynamic shared memory starts at a multiple of 1024 bytes. It does, because the kernel has
  // no static shared memory.
  extern __shared__ __align__(1024) char raw[];
  auto& shared = *reinterpret_cast<typename Traits::SharedStorage*>(raw);
  prepare_backward<Traits>(p, shared);
  if (threadIdx.x < kWarpgroup) {
    const int warp = threadIdx.x / 32;
    // The warpgroup releases registers only after one of its warps has planned the first tile.
    Planned planned{};
    if (warp == kPlansKeys) planned = plan_position<Traits>(p, shared, take_position(p, true), 0);
    cutlass::arch::warpgroup_reg_dealloc<Traits::kMoverRegisters>();
    if (threadIdx.x == kWarp * kLoadsQueries) load_query_tiles<Traits>(p, shared);
    if (warp == kPlansKeys) plan_key_tiles<Traits>(p, shared, planned);
    if (warp == kLoadsStatistics) load_statistics<Traits>(p, shared);
    if (warp == kStoresGradients && p.schedule.additions != nullptr) store_gradients<Traits, true>(p, shared);
    if (threadIdx.x == kWarp * kStoresGradients && p.schedule.additions == nullptr) {
      store_gradients<Traits, false>(p, shared);
    }
  } else {
    // The mask tables are built before `warpgroup_reg_alloc`, which waits until the producer warpgroup has released
    // registers.
    const QueryColumnMask column_mask(shared.mask_words, p.axis);
    column_mask.template build<Traits::kQueries>(p.axis, threadIdx.x / 32 - kConsumerWarps / 2, kConsumerWarps,
                                                 &p.q_boxes);
    cutlass::arch::warpgroup_reg_alloc<Traits::kConsumerRegisters>();
    Differentiation<Traits>(p, shared).run();
  }
}

}  // namespace natten_jax::sm90
