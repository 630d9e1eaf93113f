// Instantiates the kernel for one element type.
#pragma once

#include "cuda/small/kernels.h"
#include "cuda/small/whole_gradient.cuh"

namespace natten_jax::small {

template <class Element, int kHeadDim>
cudaError_t launch_whole_gradient(const BackwardParams& params, const LaunchShape& shape) {
  return launch(natten_jax_small_whole_gradient<Element, kHeadDim>, shape, params);
}

}  // namespace natten_jax::small
