// Instantiates the kernel for one element type.
#pragma once

#include "cuda/small/kernels.h"
#include "cuda/small/query_gradient.cuh"

namespace natten_jax::small {

template <class Element, int kHeadDim>
cudaError_t launch_query_gradient(const BackwardParams& params, const LaunchShape& shape) {
  return launch_form<kHeadDim>(
      params, shape, [](auto has_boxes) { return natten_jax_small_query_gradient<Element, kHeadDim, has_boxes>; });
}

}  // namespace natten_jax::small
