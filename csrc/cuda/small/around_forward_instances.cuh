// Instantiates the kernel for one element type, of problems of which some dimension wraps.
#pragma once

#include "cuda/common/arithmetic.cuh"
#include "cuda/small/forward.cuh"
#include "cuda/small/kernels.h"

namespace natten_jax::small {

template <ElementType kType>
cudaError_t launch_forward_around(int head_dim, const ForwardParams& params, const LaunchShape& shape) {
  return launch_loading(head_dim, params, shape, [&](auto width, auto has_boxes) {
    using Element = ElementOf<kType>;
    return params.has_terms_of_heads() ? natten_jax_small_forward<Element, width, has_boxes, true, false, AroundItems>
                                       : natten_jax_small_forward<Element, width, has_boxes, false, false, AroundItems>;
  });
}
template cudaError_t launch_forward_around<ElementType::NATTEN_JAX_INSTANCE>(int, const ForwardParams&,
                                                                             const LaunchShape&);

}  // namespace natten_jax::small
