// Instantiates the kernels for one element type.
#pragma once

#include "cuda/small/additional_gradient.cuh"
#include "cuda/small/kernels.h"

namespace natten_jax::small {

template <class Element, int kHeadDim>
cudaError_t launch_additional_gradient(const AdditionalParams& params, int ctas, cudaStream_t stream) {
  const LaunchShape shape{dim3(ctas), 32 * kAdditionalWarps, sizeof(AdditionalShared<kHeadDim>), stream};
  const cudaError_t error = launch(natten_jax_small_additional_gradient<Element, kHeadDim>, shape, params);
  if (error != cudaSuccess) return error;
  const std::int64_t pairs =
      std::int64_t{params.batch} * params.additional_kv * params.heads_kv * (params.head_dim + params.head_dim_v) / 2;
  const auto blocks = static_cast<unsigned>((pairs + kAdditionalSumThreads - 1) / kAdditionalSumThreads);
  return launch(natten_jax_small_additional_gradient_sum<Element>,
                LaunchShape{dim3(blocks), kAdditionalSumThreads, 0, stream}, params);
}

}  // namespace natten_jax::small
