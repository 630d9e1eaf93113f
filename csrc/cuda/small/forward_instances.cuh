// Instantiates the kernel for one element type and feature.
#pragma once

#include "cuda/common/arithmetic.cuh"
#include "cuda/small/features.cuh"
#include "cuda/small/forward.cuh"

namespace natten_jax::small {

template <ElementType kType, Feature kFeature>
cudaError_t find_box_kernels(bool& result) {
  using Traits = FeatureTraits<kFeature>;
  constexpr bool kHasBoxes = true;
  cudaFuncAttributes attributes{};
  const cudaError_t error =
      cudaFuncGetAttributes(&attributes, natten_jax_small_forward<ElementOf<kType>, kHeadDims[0], kHasBoxes,
                                                                  Terms::kPerHead, kFeature, typename Traits::Items>);
  result = attributes.ptxVersion >= 90;
  return error;
}
template cudaError_t find_box_kernels<ElementType::NATTEN_JAX_INSTANCE, Feature::NATTEN_JAX_FEATURE>(bool&);

template <ElementType kType, Feature kFeature>
cudaError_t launch_forward(int head_dim, const ForwardParams& params, const LaunchShape& shape) {
  return launch_loading<kFeature>(head_dim, params, shape, [&](auto width, auto has_boxes) {
    using Element = ElementOf<kType>;
    using Traits = FeatureTraits<kFeature>;
    const bool has_terms = params.has_head_terms();
    using Items = typename Traits::Items;
    using PlainForwardItems = typename Traits::template PlainForwardItems<width>;
    if constexpr (kFeature == Feature::kNone) {
      if (params.layouts != nullptr) {
        return natten_jax_small_forward<Element, width, has_boxes, Terms::kPerHead, kFeature, EntryItems>;
      }
      if (params.is_plain && has_terms) {
        return natten_jax_small_forward<Element, width, has_boxes, Terms::kPerHead, kFeature, PlainForwardItems>;
      }
    }
    if (!has_terms && (params.is_plain || !PlainForwardItems::kIsPlain)) {
      return natten_jax_small_forward<Element, width, has_boxes, Terms::kShared, kFeature, PlainForwardItems>;
    }
    // Problems that are not plain use the kernel for per-head terms even without such terms, to limit the number of
    // compiled kernels.
    return natten_jax_small_forward<Element, width, has_boxes, Terms::kPerHead, kFeature, Items>;
  });
}
template cudaError_t launch_forward<ElementType::NATTEN_JAX_INSTANCE, Feature::NATTEN_JAX_FEATURE>(int,
                                                                                                   const ForwardParams&,
                                                                                                   const LaunchShape&);

}  // namespace natten_jax::small
