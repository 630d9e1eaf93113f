// Instantiates the forward kernel for one element type.
#pragma once

#include "cuda/sm90/forward.cuh"
#include "cuda/sm90/forward.h"

namespace natten_jax::sm90 {

template <class Traits>
cudaError_t launch(const ForwardParams& params, int ctas, cudaStream_t stream) {
  const auto kernel = natten_jax_sm90_fna_forward<Traits>;
  constexpr int kSharedMemory = sizeof(typename Traits::SharedStorage);
  static_assert(kSharedMemory <= 227 * 1024);
  if (const auto error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedMemory)) {
    return error;
  }
  kernel<<<ctas, Traits::kThreads, kSharedMemory, stream>>>(params);
  return cudaGetLastError();
}

template <class Element, int kHeadDim, int kColumns, int kWarpgroups = 2>
cudaError_t launch_schedule(const ForwardParams& params, bool is_ping_pong, int ctas, cudaStream_t stream) {
  return is_ping_pong ? launch<ForwardTraits<Element, kHeadDim, kColumns, kWarpgroups, true>>(params, ctas, stream)
                      : launch<ForwardTraits<Element, kHeadDim, kColumns, kWarpgroups, false>>(params, ctas, stream);
}

template <bool kIsBFloat16>
cudaError_t launch_forward(const ForwardParams& params, int head_dim, int columns, bool is_ping_pong, int ctas,
                           cudaStream_t stream) {
  using Element = std::conditional_t<kIsBFloat16, cutlass::bfloat16_t, cutlass::half_t>;
  if (head_dim == 64 && params.q_tile_tokens > 128) {
    return launch_schedule<Element, 64, 128, 3>(params, is_ping_pong, ctas, stream);
  }
  if (head_dim == 64) return launch_schedule<Element, 64, 128>(params, is_ping_pong, ctas, stream);
  if (head_dim == 192) return launch_schedule<Element, 192, 96>(params, is_ping_pong, ctas, stream);
  if (head_dim == 256) return launch_schedule<Element, 256, 64>(params, is_ping_pong, ctas, stream);
  if (columns == 96) return launch_schedule<Element, 128, 96>(params, is_ping_pong, ctas, stream);
  return launch_schedule<Element, 128, 128>(params, is_ping_pong, ctas, stream);
}

}  // namespace natten_jax::sm90
