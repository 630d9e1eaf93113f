// Instantiates the kernel of key and value gradients for one element type and one method of loading slabs.
#pragma once

#include "cuda/small/ring_kernels.h"
#include "cuda/small/ring_key_value_gradient.cuh"

namespace natten_jax::small {

template <ElementType kType, RingLoads kLoads>
cudaError_t launch_ring_key_value_gradient(int head_dim, const RingGradientParams& params, const LaunchShape& shape) {
  using Element = ElementOf<kType>;
  return with_constant<kHeadDims[0], kHeadDims[1]>(head_dim, cudaErrorInvalidValue, [&](auto width) {
    return launch(natten_jax_small_ring_key_value_gradient<Element, width, kLoads, RingBiases::kNone>, shape, params);
  });
}
template cudaError_t launch_ring_key_value_gradient<ElementType::NATTEN_JAX_INSTANCE, RingLoads::NATTEN_JAX_FEATURE>(
    int, const RingGradientParams&, const LaunchShape&);

}  // namespace natten_jax::small
