// Instantiates the kernel for one element type and feature.
#pragma once

#include "cuda/common/arithmetic.cuh"
#include "cuda/small/features.cuh"
#include "cuda/small/whole_gradient.cuh"

namespace natten_jax::small {

template <ElementType kType, Feature kFeature>
cudaError_t launch_whole_gradient(int head_dim, const WholeParams<kFeature == Feature::kRelativeBias>& params,
                                  const LaunchShape& shape) {
  if constexpr (kFeature == Feature::kWraps) {
    return cudaErrorInvalidValue;  // if a dimension wraps, a layout is never a single region
  } else {
    return with_constant<kHeadDims[0], kHeadDims[1]>(head_dim, cudaErrorInvalidValue, [&](auto width) {
      static_assert(width <= kLargestBoxHeadDim);
      using Element = ElementOf<kType>;
      // Use a separate instance without per-head terms, because these terms spill 13 more registers. With these terms,
      // layouts with 64 dilation groups of 7 x 7 tokens took 4% longer.
      if (!params.has_head_terms()) {
        return launch(natten_jax_small_whole_gradient<Element, width, Terms::kShared, kFeature>, shape, params);
      }
      return launch(natten_jax_small_whole_gradient<Element, width, Terms::kPerHead, kFeature>, shape, params);
    });
  }
}
template cudaError_t launch_whole_gradient<ElementType::NATTEN_JAX_INSTANCE, Feature::NATTEN_JAX_FEATURE>(
    int, const WholeParams<Feature::NATTEN_JAX_FEATURE == Feature::kRelativeBias>&, const LaunchShape&);

}  // namespace natten_jax::small
