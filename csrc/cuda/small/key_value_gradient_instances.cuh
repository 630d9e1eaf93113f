// Instantiates the kernel for one element type.
#pragma once

#include "cuda/common/arithmetic.cuh"
#include "cuda/small/kernels.h"
#include "cuda/small/key_value_gradient.cuh"

namespace natten_jax::small {

template <ElementType kType>
cudaError_t launch_key_value_gradient(int head_dim, const BackwardParams& params, const LaunchShape& shape) {
  const auto launch_as = [&](auto is_of_one) {
    return launch_loading(head_dim, params, shape, [&](auto width, auto has_boxes) {
      // Heads of 64 took 7% longer that way.
      constexpr bool kIsOfOne = has_boxes && width == 32 && decltype(is_of_one)::value;
      using Element = ElementOf<kType>;
      return params.layouts == nullptr
                 ? natten_jax_small_key_value_gradient<Element, width, has_boxes, kIsOfOne>
                 : natten_jax_small_key_value_gradient<Element, width, has_boxes, kIsOfOne, false, EntryItems>;
    });
  };
  return params.heads == params.heads_kv ? launch_as(std::true_type{}) : launch_as(std::false_type{});
}
template cudaError_t launch_key_value_gradient<ElementType::NATTEN_JAX_INSTANCE>(int, const BackwardParams&,
                                                                                 const LaunchShape&);

}  // namespace natten_jax::small
