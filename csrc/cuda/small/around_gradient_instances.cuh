// Instantiates the kernels of gradients for one element type, of problems of which some dimension wraps.
#pragma once

#include "cuda/common/arithmetic.cuh"
#include "cuda/small/kernels.h"
#include "cuda/small/key_value_gradient.cuh"
#include "cuda/small/query_gradient.cuh"

namespace natten_jax::small {

template <ElementType kType>
cudaError_t launch_query_gradient_around(int head_dim, const BackwardParams& params, const LaunchShape& shape) {
  return launch_loading(head_dim, params, shape, [](auto width, auto has_boxes) {
    return natten_jax_small_query_gradient<ElementOf<kType>, width, has_boxes, false, AroundItems>;
  });
}
template cudaError_t launch_query_gradient_around<ElementType::NATTEN_JAX_INSTANCE>(int, const BackwardParams&,
                                                                                    const LaunchShape&);

template <ElementType kType>
cudaError_t launch_key_value_gradient_around(int head_dim, const BackwardParams& params, const LaunchShape& shape) {
  const auto launch_as = [&](auto is_of_one) {
    return launch_loading(head_dim, params, shape, [](auto width, auto has_boxes) {
      // As where no dimension wraps.
      constexpr bool kIsOfOne = has_boxes && width == 32 && decltype(is_of_one)::value;
      return natten_jax_small_key_value_gradient<ElementOf<kType>, width, has_boxes, kIsOfOne, false, AroundItems>;
    });
  };
  return params.heads == params.heads_kv ? launch_as(std::true_type{}) : launch_as(std::false_type{});
}
template cudaError_t launch_key_value_gradient_around<ElementType::NATTEN_JAX_INSTANCE>(int, const BackwardParams&,
                                                                                        const LaunchShape&);

}  // namespace natten_jax::small
