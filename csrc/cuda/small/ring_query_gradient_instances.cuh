// Instantiates the kernel of query gradients for one element type and one method of loading slabs.
#pragma once

#include "cuda/small/ring_kernels.h"
#include "cuda/small/ring_query_gradient.cuh"

namespace natten_jax::small {

template <ElementType kType, RingLoads kLoads>
cudaError_t launch_ring_query_gradient(int head_dim, const RingQueryParams& params, const LaunchShape& shape) {
  using Element = ElementOf<kType>;
  return with_constant<0, 1>(params.shape.form, cudaErrorInvalidValue, [&](auto form) {
    return with_constant<kHeadDims[0], kHeadDims[1]>(head_dim, cudaErrorInvalidValue, [&](auto width) {
      return launch(natten_jax_small_ring_query_gradient<Element, width, form, kLoads, RingBiases::kNone>, shape,
                    params);
    });
  });
}
template cudaError_t launch_ring_query_gradient<ElementType::NATTEN_JAX_INSTANCE, RingLoads::NATTEN_JAX_FEATURE>(
    int, const RingQueryParams&, const LaunchShape&);

}  // namespace natten_jax::small
