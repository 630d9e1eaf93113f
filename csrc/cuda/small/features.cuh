// Template arguments of the kernels for each feature.
#pragma once

#include <type_traits>

#include "cuda/small/kernels.h"
#include "cuda/small/seams.cuh"

namespace natten_jax::small {

template <Feature kFeature>
struct FeatureTraits {
  using Items = std::conditional_t<kFeature == Feature::kWraps, WrappingItems, CtaItems>;
  // Class of a CTA's items in forward passes of plain problems. With key biases and heads narrower than 64, registers
  // would spill 16 bytes with PlainItems.
  template <int kHeadDim>
  using PlainForwardItems =
      std::conditional_t<kFeature == Feature::kWraps || (kFeature == Feature::kKeyBias && kHeadDim < 64), Items,
                         PlainItems>;
};

}  // namespace natten_jax::small
