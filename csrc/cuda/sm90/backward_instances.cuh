// Instantiates the backward kernel for one element type.
#pragma once

#include <algorithm>

#include "cuda/common/overlapped_launch.cuh"
#include "cuda/sm90/backward.cuh"
#include "cuda/sm90/backward.h"

namespace natten_jax::sm90 {

template <class Traits>
cudaError_t launch_backward_form(const BackwardParams& params, cudaStream_t stream) {
  const auto kernel = natten_jax_sm90_backward<Traits>;
  constexpr int kSharedMemory = sizeof(typename Traits::SharedStorage);
  static_assert(kSharedMemory <= 227 * 1024);
  int device = 0, multiprocessors = 0;
  if (const auto error = cudaGetDevice(&device)) return error;
  if (const auto error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device)) return error;
  if (const auto error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedMemory)) {
    return error;
  }
  const int blocks = std::min(params.tiles, multiprocessors);
  return launch_overlapped(kernel, blocks, kThreads, kSharedMemory, stream, params);
}

template <class Element, int kHeadDim>
cudaError_t launch_backward_for(const BackwardParams& params, cudaStream_t stream) {
  constexpr BackwardTile kTile = backward_tile(kHeadDim);
  constexpr int kStages = kHeadDim == 256 ? 1 : 2;
  return launch_backward_form<BackwardTraits<Element, kHeadDim, kTile.keys, kTile.queries, kStages>>(params, stream);
}

template <bool kIsBFloat16>
cudaError_t launch_backward(const BackwardParams& params, int head_dim, cudaStream_t stream) {
  using Element = std::conditional_t<kIsBFloat16, cutlass::bfloat16_t, cutlass::half_t>;
  if (head_dim == 64) return launch_backward_for<Element, 64>(params, stream);
  if (head_dim == 256) return launch_backward_for<Element, 256>(params, stream);
  return launch_backward_for<Element, 128>(params, stream);
}

}  // namespace natten_jax::sm90
