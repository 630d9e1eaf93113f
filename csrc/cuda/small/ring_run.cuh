// Entry point of kernels with a ring (ring_shape.h): divides the warps of a CTA into loader warps and compute warps.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "cuda/small/ring_chunks.cuh"
#include "cuda/small/ring_walk.cuh"

namespace natten_jax::small {

/// True if kernels with this method of loading slabs are compiled for the current architecture.
constexpr bool is_ring_compiled(RingLoads loads) {
#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
  return loads == RingLoads::kChunks;
#else
  return true;
#endif
}

/// Return the registers per thread of compute warps and of TMA loader warps. In total, a CTA must not have more
/// registers than it is launched with. Loader warps whose lanes store data need more than 32 registers per thread. With
/// 32, the compiler spilled values that both kinds of warps use to local memory. With heads of 32, it loaded these
/// values seven times per slab.
constexpr int ring_registers(int warps, bool lanes_store) {
  if (lanes_store) return warps == 12 ? 152 : 104;
  return warps == 12 ? 160 : 112;
}
constexpr int loader_registers(bool lanes_store) {
  return lanes_store ? 56 : 32;
}

/// Runs a kernel. Loader warps load slabs and tiles. Compute warps process them with functions of class `Worker`.
template <RingLoads kLoads, int kHeadDim, class Worker, class Params>
CUTE_DEVICE void run_ring(const Params& p) {
  if constexpr (is_ring_compiled(kLoads)) {
    constexpr bool kHasBoxes = kLoads == RingLoads::kBoxes;
    constexpr int kWarps = most_ring_warps(kLoads, kHeadDim);
    extern __shared__ __align__(1024) char raw[];
    using Barriers = RingBarriers<kLoads, kLanesStore<Params>>;
    Barriers& barriers = *reinterpret_cast<Barriers*>(raw + p.shape.barriers);
    const int warp = ring_warp();
    RingAlong::tabulate<Params::kKernel == Kernel::kKeyValueGradient>(p, raw);
    if (threadIdx.x == 0) {
      barriers.init(p.shape);
      if constexpr (kHasBoxes) cutlass::arch::fence_barrier_init();
    }
    __syncthreads();
    const std::uint32_t shared = shared_address(raw);
    const RingAlong along(p, shared);
    if (warp < kWarps) {
      if constexpr (kHasBoxes) cutlass::arch::warpgroup_reg_alloc<ring_registers(kWarps, kLanesStore<Params>)>();
      if (warp >= p.shape.warps) return;
      typename Worker::Reader reader{p, along, barriers, shared};
      Worker worker(p, reader);
      reader.walk(worker);
    } else if constexpr (kHasBoxes) {
      cutlass::arch::warpgroup_reg_dealloc<loader_registers(kLanesStore<Params>)>();
      if (kLanesStore<Params> || threadIdx.x % 32 == 0)
        load_ring<Params, kHeadDim>(p, along, warp - kWarps, shared, barriers);
    } else {
      RingChunks<Params, kHeadDim>(p, along, warp - kWarps, shared, barriers).load();
    }
  }
}

}  // namespace natten_jax::small
