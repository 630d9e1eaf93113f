// Instantiates all kernels with key biases for one element type.
#pragma once

#include "cuda/small/ring_forward.cuh"
#include "cuda/small/ring_kernels.h"
#include "cuda/small/ring_key_value_gradient.cuh"
#include "cuda/small/ring_query_gradient.cuh"

namespace natten_jax::small {

template <ElementType kType>
cudaError_t launch_ring_key_biased_forward(int head_dim, const WithKeyBias<RingForwardParams>& params,
                                           const LaunchShape& shape) {
  return with_constant<0, 1>(params.shape.form, cudaErrorInvalidValue, [&](auto form) {
    return with_constant<kHeadDims[0], kHeadDims[1]>(head_dim, cudaErrorInvalidValue, [&](auto width) {
      return launch(natten_jax_small_ring_forward<ElementOf<kType>, width, form, RingLoads::kBoxes, RingBiases::kKey>,
                    shape, params);
    });
  });
}
template cudaError_t launch_ring_key_biased_forward<ElementType::NATTEN_JAX_INSTANCE>(
    int, const WithKeyBias<RingForwardParams>&, const LaunchShape&);

template <ElementType kType>
cudaError_t launch_ring_key_biased_query_gradient(int head_dim, const WithKeyBias<RingQueryParams>& params,
                                                  const LaunchShape& shape) {
  return with_constant<0, 1>(params.shape.form, cudaErrorInvalidValue, [&](auto form) {
    return with_constant<kHeadDims[0], kHeadDims[1]>(head_dim, cudaErrorInvalidValue, [&](auto width) {
      return launch(
          natten_jax_small_ring_query_gradient<ElementOf<kType>, width, form, RingLoads::kBoxes, RingBiases::kKey>,
          shape, params);
    });
  });
}
template cudaError_t launch_ring_key_biased_query_gradient<ElementType::NATTEN_JAX_INSTANCE>(
    int, const WithKeyBias<RingQueryParams>&, const LaunchShape&);

template <ElementType kType>
cudaError_t launch_ring_key_biased_key_value_gradient(int head_dim, const WithKeyBias<RingGradientParams>& params,
                                                      const LaunchShape& shape) {
  return with_constant<kHeadDims[0], kHeadDims[1]>(head_dim, cudaErrorInvalidValue, [&](auto width) {
    return launch(
        natten_jax_small_ring_key_value_gradient<ElementOf<kType>, width, RingLoads::kBoxes, RingBiases::kKey>, shape,
        params);
  });
}
template cudaError_t launch_ring_key_biased_key_value_gradient<ElementType::NATTEN_JAX_INSTANCE>(
    int, const WithKeyBias<RingGradientParams>&, const LaunchShape&);

}  // namespace natten_jax::small
