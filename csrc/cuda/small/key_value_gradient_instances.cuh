// Instantiates the kernel for one element type.
#pragma once

#include "cuda/small/kernels.h"
#include "cuda/small/key_value_gradient.cuh"

namespace natten_jax::small {

template <class Element, int kHeadDim>
cudaError_t launch_key_value_gradient(const BackwardParams& params, const LaunchShape& shape) {
  // Heads of 64 took 7% longer that way.
  constexpr bool kCanBeOfOne = kHeadDim == 32;
  const auto launch_as = [&](auto is_of_one) {
    return launch_form<kHeadDim>(params, shape, [](auto has_boxes) {
      constexpr bool kIsOfOne = has_boxes && kCanBeOfOne && decltype(is_of_one)::value;
      return natten_jax_small_key_value_gradient<Element, kHeadDim, has_boxes, kIsOfOne>;
    });
  };
  return params.heads == params.heads_kv ? launch_as(std::true_type{}) : launch_as(std::false_type{});
}

}  // namespace natten_jax::small
