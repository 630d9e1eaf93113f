// Instantiates the kernels for one element type.
#pragma once

#include "cuda/common/arithmetic.cuh"
#include "cuda/small/additional_gradient.cuh"
#include "cuda/small/kernels.h"

namespace natten_jax::small {

template <ElementType kType>
cudaError_t launch_additional_gradient(int head_dim, const AdditionalParams& params, int ctas, cudaStream_t stream) {
  const cudaError_t error = with_head_dim(head_dim, [&](auto width) {
    const LaunchShape shape{dim3(ctas), 32 * kAdditionalWarps, sizeof(AdditionalShared<width>), stream};
    return launch(natten_jax_small_additional_gradient<ElementOf<kType>, width>, shape, params);
  });
  if (error != cudaSuccess) return error;
  const std::int64_t pairs =
      std::int64_t{params.batch} * params.additional_kv * params.heads_kv * (params.head_dim + params.head_dim_v) / 2;
  const auto blocks = static_cast<unsigned>((pairs + kAdditionalSumThreads - 1) / kAdditionalSumThreads);
  return launch(natten_jax_small_additional_gradient_sum<ElementOf<kType>>,
                LaunchShape{dim3(blocks), kAdditionalSumThreads, 0, stream}, params);
}
template cudaError_t launch_additional_gradient<ElementType::NATTEN_JAX_INSTANCE>(int, const AdditionalParams&, int,
                                                                                  cudaStream_t);

}  // namespace natten_jax::small
