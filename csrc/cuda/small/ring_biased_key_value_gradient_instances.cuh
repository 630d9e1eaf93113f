// Instantiates the kernel with a relative bias for one element type.
#pragma once

#include "cuda/small/ring_kernels.h"
#include "cuda/small/ring_key_value_gradient.cuh"

namespace natten_jax::small {

template <ElementType kType>
cudaError_t launch_ring_biased_key_value_gradient(int head_dim, const RingBiasedParams& params,
                                                  const LaunchShape& shape) {
  using Element = ElementOf<kType>;
  return with_constant<kHeadDims[0], kHeadDims[1]>(head_dim, cudaErrorInvalidValue, [&](auto width) {
    return launch(natten_jax_small_ring_key_value_gradient<Element, width, RingLoads::kBoxes, RingBiases::kRelative>,
                  shape, params);
  });
}
template cudaError_t launch_ring_biased_key_value_gradient<ElementType::NATTEN_JAX_INSTANCE>(int,
                                                                                             const RingBiasedParams&,
                                                                                             const LaunchShape&);

}  // namespace natten_jax::small
