// Forward neighborhood attention for Hopper and 8-bit floats.
//
// The warps that load, plan and store are as in forward.cuh. Differences: an additional warpgroup transposes value
// tiles in shared memory (fp8_values.cuh); weighted values are accumulated in float32 outside the tensor cores
// (fp8_products.cuh); weights are e4m3 numbers (fp8_softmax.cuh); the output has 16 bits.
#pragma once

#include "cuda/sm90/forward.cuh"
#include "cuda/sm90/fp8_attention.cuh"
#include "cuda/sm90/fp8_values.cuh"

namespace natten_jax::sm90 {

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    natten_jax_sm90_fna_forward_float8(const __grid_constant__ ForwardParams p) {
  // No static shared memory: the dynamic part starts at a multiple of 1024 bytes, as the swizzle needs.
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
    cutlass::arch::warpgroup_reg_dealloc<Traits::kTurnerRegisters>();
    turn_values<Traits>(p, shared);
  }
}

}  // namespace natten_jax::sm90
