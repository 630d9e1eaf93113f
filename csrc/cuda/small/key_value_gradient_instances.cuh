// Instantiates the kernel for one element type and feature.
#pragma once

#include "cuda/common/arithmetic.cuh"
#include "cuda/small/features.cuh"
#include "cuda/small/key_value_gradient.cuh"

namespace natten_jax::small {

template <ElementType kType, Feature kFeature>
cudaError_t launch_key_value_gradient(int head_dim, const BackwardParams& params, const LaunchShape& shape) {
  const auto launch_as = [&](auto is_single) {
    return launch_loading<kFeature>(head_dim, params, shape, [&](auto width, auto has_boxes) {
      // Only heads of 32 use kIsSingle: heads of 64 took 7% longer with it.
      constexpr bool kIsSingle = has_boxes && width == 32 && decltype(is_single)::value;
      using Element = ElementOf<kType>;
      using Traits = FeatureTraits<kFeature>;
      if constexpr (kFeature == Feature::kNone) {
        if (params.layouts != nullptr) {
          return natten_jax_small_key_value_gradient<Element, width, has_boxes, kIsSingle, kFeature, EntryItems>;
        }
      }
      return natten_jax_small_key_value_gradient<Element, width, has_boxes, kIsSingle, kFeature,
                                                 typename Traits::Items>;
    });
  };
  return params.heads == params.heads_kv ? launch_as(std::true_type{}) : launch_as(std::false_type{});
}
template cudaError_t launch_key_value_gradient<ElementType::NATTEN_JAX_INSTANCE, Feature::NATTEN_JAX_FEATURE>(
    int, const BackwardParams&, const LaunchShape&);

}  // namespace natten_jax::small
