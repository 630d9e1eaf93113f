// Instantiates the kernel for one element type.
#pragma once

#include "cuda/common/arithmetic.cuh"
#include "cuda/small/kernels.h"
#include "cuda/small/query_gradient.cuh"

namespace natten_jax::small {

template <ElementType kType>
cudaError_t launch_query_gradient(int head_dim, const BackwardParams& params, const LaunchShape& shape) {
  return launch_loading(head_dim, params, shape, [&](auto width, auto has_boxes) {
    return params.layouts == nullptr
               ? natten_jax_small_query_gradient<ElementOf<kType>, width, has_boxes>
               : natten_jax_small_query_gradient<ElementOf<kType>, width, has_boxes, false, EntryItems>;
  });
}
template cudaError_t launch_query_gradient<ElementType::NATTEN_JAX_INSTANCE>(int, const BackwardParams&,
                                                                             const LaunchShape&);

}  // namespace natten_jax::small
