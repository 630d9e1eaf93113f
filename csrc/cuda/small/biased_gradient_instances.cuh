// Instantiates the kernels of gradients with a relative bias for one element type.
#pragma once

#include "cuda/common/arithmetic.cuh"
#include "cuda/small/kernels.h"
#include "cuda/small/whole_gradient.cuh"

namespace natten_jax::small {

template <ElementType kType>
cudaError_t launch_biased_query_gradient(int head_dim, const BackwardParams& params, const LaunchShape& shape) {
  return launch_biased(head_dim, params, shape, [](auto width, auto has_boxes) {
    return natten_jax_small_query_gradient<ElementOf<kType>, width, has_boxes, true>;
  });
}
template cudaError_t launch_biased_query_gradient<ElementType::NATTEN_JAX_INSTANCE>(int, const BackwardParams&,
                                                                                    const LaunchShape&);

template <ElementType kType>
cudaError_t launch_biased_key_value_gradient(int head_dim, const BackwardParams& params, const LaunchShape& shape) {
  const auto launch_as = [&](auto is_of_one) {
    return launch_biased(head_dim, params, shape, [](auto width, auto has_boxes) {
      // As without a bias.
      constexpr bool kIsOfOne = has_boxes && width == 32 && decltype(is_of_one)::value;
      return natten_jax_small_key_value_gradient<ElementOf<kType>, width, has_boxes, kIsOfOne, true>;
    });
  };
  return params.heads == params.heads_kv ? launch_as(std::true_type{}) : launch_as(std::false_type{});
}
template cudaError_t launch_biased_key_value_gradient<ElementType::NATTEN_JAX_INSTANCE>(int, const BackwardParams&,
                                                                                        const LaunchShape&);

template <ElementType kType>
cudaError_t launch_biased_whole_gradient(int head_dim, const WholeBiasParams& params, const LaunchShape& shape) {
  return with_biased_head_dim(head_dim, [&](auto width) {
    return launch(natten_jax_small_whole_gradient<ElementOf<kType>, width, true>, shape, params);
  });
}
template cudaError_t launch_biased_whole_gradient<ElementType::NATTEN_JAX_INSTANCE>(int, const WholeBiasParams&,
                                                                                    const LaunchShape&);

}  // namespace natten_jax::small
