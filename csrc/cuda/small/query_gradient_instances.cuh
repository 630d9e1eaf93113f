// Instantiates the kernel for one element type and feature.
#pragma once

#include "cuda/common/arithmetic.cuh"
#include "cuda/small/features.cuh"
#include "cuda/small/query_gradient.cuh"

namespace natten_jax::small {

template <ElementType kType, Feature kFeature>
cudaError_t launch_query_gradient(int head_dim, const BackwardParams& params, const LaunchShape& shape) {
  return launch_loading<kFeature>(head_dim, params, shape, [&](auto width, auto has_boxes) {
    using Element = ElementOf<kType>;
    using Traits = FeatureTraits<kFeature>;
    if constexpr (kFeature == Feature::kNone) {
      if (params.layouts != nullptr) {
        return natten_jax_small_query_gradient<Element, width, has_boxes, kFeature, EntryItems>;
      }
    }
    return natten_jax_small_query_gradient<Element, width, has_boxes, kFeature, typename Traits::Items>;
  });
}
template cudaError_t launch_query_gradient<ElementType::NATTEN_JAX_INSTANCE, Feature::NATTEN_JAX_FEATURE>(
    int, const BackwardParams&, const LaunchShape&);

}  // namespace natten_jax::small
