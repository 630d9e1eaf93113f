// Template arguments of the kernels for each feature.
#pragma once

#include <type_traits>

#include "cuda/small/kernels.h"
#include "cuda/small/seams.cuh"

namespace natten_jax::small {

template <Feature kFeature>
struct FeatureTraits {
  using Items = std::conditional_t<kFeature == Feature::kWraps, AroundItems, CtaItems>;
  // Items of forward passes of plain problems. With key biases and narrow heads, PlainItems would spill 16 bytes.
  template <int kHeadDim>
  using ItemsOfPlain =
      std::conditional_t<kFeature == Feature::kWraps || (kFeature == Feature::kKeyBias && kHeadDim < 64), Items,
                         PlainItems>;
};

}  // namespace natten_jax::small
