// Forward neighborhood attention for Hopper. TMA loads multi-dimensional tiles directly from the arrays of the call,
// and wgmma computes the products.
//
// A CTA consists of a producer warpgroup and two or three consumer warpgroups. The producer (forward_pipeline.cuh) has
// a warp for each of four tasks: loading query and key tiles, planning query tiles, loading value tiles, and storing
// output tiles. Each consumer warpgroup (forward_attention.cuh) computes 64 rows of the query tile: their logits,
// online softmax in base 2, and output.
//
// The key/value tiles of a query tile cover the bounding box of all keys that its queries attend to (see). If all rows
// of a warpgroup attend to all keys of a key/value tile, the warpgroup does not mask the tile. In other tiles, it uses
// a mask with a bit per logit (forward_mask.cuh).
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "cuda/sm90/forward_attention.cuh"
#include "cuda/sm90/forward_pipeline.cuh"

namespace natten_jax::sm90 {

/// Prepares a CTA: initializes mbarriers and buffers, and prefetches tensor maps.
template <class Traits>
CUTE_DEVICE void prepare(const ForwardParams& p, typename Traits::SharedStorage& shared) {
  if (p.clears_tiles) {
    // Rows that no load writes are multiplied by weights of zero. They must be finite, so they are set to zero here.
    constexpr int kWords = offsetof(typename Traits::SharedStorage, o) / sizeof(uint4);
    for (int i = threadIdx.x; i < kWords; i += Traits::kThreads) {
      reinterpret_cast<uint4*>(&shared)[i] = make_uint4(0, 0, 0, 0);
    }
    cutlass::arch::fence_view_async_shared();
  }
  if constexpr (Traits::kHasKeyBias) prepare_biases<Traits>(p, shared);
  constexpr int kPrefetching = kWarp * kStoresTiles;
  if (threadIdx.x >= kPrefetching && threadIdx.x < kPrefetching + kGroupClasses) {
    // Prefetch the tensor maps, so that the first loads do not wait for them.
    const int c = threadIdx.x - kPrefetching;
    if (p.query_classes >> c & 1) {
      prefetch_tma_descriptor(&p.query[c]);
      prefetch_tma_descriptor(&p.out[c]);
    }
    if (p.kv_classes >> c & 1) {
      prefetch_tma_descriptor(&p.key[c]);
      prefetch_tma_descriptor(&p.value[c]);
    }
  }
  if (threadIdx.x == 0) {
    ClusterBarrier::init(&shared.first_key_loaded, 1);
    ClusterBarrier::init(&shared.full_q, 1);
    ClusterBarrier::init(&shared.empty_q, Traits::kSeparateOutput ? Traits::kConsumers : 1);
    // Arrivals: if the launch continues earlier launches, every lane of the warp that fetches their results; otherwise,
    // only the thread that stores output.
    ClusterBarrier::init(&shared.empty_o, continues<Traits>(p) ? kWarp : 1);
    for (int i = 0; i < Traits::kPlans; ++i) {
      ClusterBarrier::init(&shared.full_plan[i], kWarp);
      ClusterBarrier::init(&shared.full_windows[i], kWarp);
      ClusterBarrier::init(&shared.empty_plan[i], Traits::kPlanReaders);
    }
    for (int i = 0; i < Traits::kStages; ++i) {
      ClusterBarrier::init(&shared.full_k[i], 1);
      ClusterBarrier::init(&shared.full_v[i], 1);
      ClusterBarrier::init(&shared.empty_k[i], Traits::kConsumers);
      ClusterBarrier::init(&shared.empty_v[i], Traits::kValueReaders);
    }
    Traits::init_more_barriers(shared);
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    natten_jax_sm90_fna_forward(const __grid_constant__ ForwardParams p) {
  // The swizzle requires that dynamic shared memory starts at a multiple of 1024 bytes. It does, because the kernel has
  // no static shared memory.
  extern __shared__ __align__(1024) char raw[];
  auto& shared = *reinterpret_cast<typename Traits::SharedStorage*>(raw);
  prepare<Traits>(p, shared);
  if (threadIdx.x < kWarpgroup) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::kServiceRegisters>();
    const int warp = threadIdx.x / 32;
    if (threadIdx.x == kWarp * kLoadsQueriesAndKeys) load_tiles<Traits, true>(p, shared);
    if (warp == kPlansTiles) plan_tiles<Traits>(p, shared);
    if (Traits::kHasKeyBias ? warp == kLoadsValues : threadIdx.x == kWarp * kLoadsValues) {
      load_tiles<Traits, false>(p, shared);
    }
    if (warp == kStoresTiles) store_tiles<Traits>(p, shared);
  } else {
    cutlass::arch::warpgroup_reg_alloc<Traits::kConsumerRegisters>();
    Attention<Traits>(p, shared).run();
  }
}

}  // namespace natten_jax::sm90
