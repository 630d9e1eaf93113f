// Instantiates the kernel for one element type.
#pragma once

#include "cuda/common/arithmetic.cuh"
#include "cuda/small/forward.cuh"
#include "cuda/small/kernels.h"

namespace natten_jax::small {

template <ElementType kType>
cudaError_t find_box_kernels(bool& result) {
  cudaFuncAttributes attributes{};
  const cudaError_t error =
      cudaFuncGetAttributes(&attributes, natten_jax_small_forward<ElementOf<kType>, kHeadDims[0], true, true>);
  result = attributes.ptxVersion >= 90;
  return error;
}
template cudaError_t find_box_kernels<ElementType::NATTEN_JAX_INSTANCE>(bool&);

template <ElementType kType>
cudaError_t launch_forward(int head_dim, const ForwardParams& params, const LaunchShape& shape) {
  return launch_loading(head_dim, params, shape, [&](auto width, auto has_boxes) {
    using Element = ElementOf<kType>;
    if (params.layouts != nullptr) return natten_jax_small_forward<Element, width, has_boxes, true, false, EntryItems>;
    const bool is_plain = params.is_plain && !params.has_terms_of_heads();
    return is_plain ? natten_jax_small_forward<Element, width, has_boxes, false, false, PlainItems>
                    : natten_jax_small_forward<Element, width, has_boxes, true>;
  });
}
template cudaError_t launch_forward<ElementType::NATTEN_JAX_INSTANCE>(int, const ForwardParams&, const LaunchShape&);

}  // namespace natten_jax::small
