// Instantiates the kernel for one element type.
#pragma once

#include "cuda/common/arithmetic.cuh"
#include "cuda/small/kernels.h"
#include "cuda/small/whole_gradient.cuh"

namespace natten_jax::small {

template <ElementType kType>
cudaError_t launch_whole_gradient(int head_dim, const BackwardParams& params, const LaunchShape& shape) {
  return with_constant<kHeadDims[0], kHeadDims[1]>(head_dim, cudaErrorInvalidValue, [&](auto width) {
    static_assert(width <= kLargestBoxHeadDim);
    return launch(natten_jax_small_whole_gradient<ElementOf<kType>, width>, shape, params);
  });
}
template cudaError_t launch_whole_gradient<ElementType::NATTEN_JAX_INSTANCE>(int, const BackwardParams&,
                                                                             const LaunchShape&);

}  // namespace natten_jax::small
