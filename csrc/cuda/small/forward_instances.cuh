// Instantiates the kernel for one element type.
#pragma once

#include "cuda/small/forward.cuh"
#include "cuda/small/kernels.h"

namespace natten_jax::small {

template <class Element, int kHeadDim>
cudaError_t launch_forward(const ForwardParams& params, const LaunchShape& shape) {
  return launch_form<kHeadDim>(params, shape, [&](auto has_boxes) {
    return params.scale.heads == nullptr ? natten_jax_small_forward<Element, kHeadDim, has_boxes, false>
                                         : natten_jax_small_forward<Element, kHeadDim, has_boxes, true>;
  });
}

}  // namespace natten_jax::small
