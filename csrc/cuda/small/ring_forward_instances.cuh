// Instantiates the forward kernel for one element type and one method of loading slabs.
#pragma once

#include "cuda/small/ring_forward.cuh"
#include "cuda/small/ring_kernels.h"

namespace natten_jax::small {

template <ElementType kType, RingLoads kLoads>
cudaError_t launch_ring_forward(int head_dim, const RingForwardParams& params, const LaunchShape& shape) {
  using Element = ElementOf<kType>;
  return with_constant<0, 1>(params.shape.form, cudaErrorInvalidValue, [&](auto form) {
    return with_constant<kHeadDims[0], kHeadDims[1]>(head_dim, cudaErrorInvalidValue, [&](auto width) {
      return launch(natten_jax_small_ring_forward<Element, width, form, kLoads, RingBiases::kNone>, shape, params);
    });
  });
}
template cudaError_t launch_ring_forward<ElementType::NATTEN_JAX_INSTANCE, RingLoads::NATTEN_JAX_FEATURE>(
    int, const RingForwardParams&, const LaunchShape&);

}  // namespace natten_jax::small
