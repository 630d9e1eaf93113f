// Forward neighborhood attention for Hopper and 8-bit floats.
//
// The code of the warps that plan, load and store tiles is shared with forward.cuh. An additional warpgroup transposes
// value tiles in shared memory (fp8_values.cuh). Weights are e4m3 numbers (fp8_softmax.cuh). Weighted values are added
// up in float32 outside of the tensor cores (fp8_products.cuh), and the output has 16-bit elements.
#pragma once

#include "cuda/sm90/forward.cuh"
#include "cuda/sm90/fp8_attention.cuh"
#include "cuda/sm90/fp8_values.cuh"

namespace natten_jax::sm90 {

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    natten_jax_sm90_fna_forward_float8(const __grid_constant__ ForwardParams p) {
  // The swizzle requires that dynamic shared memory starts at a multiple of 1024 bytes. This is so, because the kernel
  // has no static shared memory.
  extern __shared__ __align__(1024) char raw[];
  auto& shared = *reinterpret_cast<typename Traits::SharedStorage*>(raw);
  prepare<Traits>(p, shared);
  if (threadIdx.x < kWarpgroup) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::kServiceRegisters>();
    const int warp = threadIdx.x / 32;
    if (threadIdx.x == kWarp * kLoadsQueriesAndKeys) load_tiles<Traits, true>(p, shared);
    if (warp == kPlansTiles) plan_tiles<Traits>(p, shared);
    if (threadIdx.x == kWarp * kLoadsValues) load_tiles<Traits, false>(p, shared);
    if (warp == kStoresTiles) store_tiles<Traits>(p, shared);
  } else if (threadIdx.x < kWarpgroup + Traits::kConsumers) {
    cutlass::arch::warpgroup_reg_alloc<Traits::kConsumerRegisters>();
    Float8Attention<Traits>(p, shared).run();
  } else {
    cutlass::arch::warpgroup_reg_dealloc<Traits::kTransposingRegisters>();
    transpose_values<Traits>(p, shared);
  }
}

}  // namespace natten_jax::sm90
