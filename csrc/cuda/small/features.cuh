// Which template arguments of the kernels a feature is.
#pragma once

#include <type_traits>

#include "cuda/small/kernels.h"
#include "cuda/small/seams.cuh"

namespace natten_jax::small {

template <Feature kFeature>
struct FeatureTraits {
  using Items = std::conditional_t<kFeature == Feature::kWraps, AroundItems, CtaItems>;
  // The items of forward passes of plain problems. With biases of keys and narrow heads, the compiler has no room for
  // items of their own: it would spill 16 bytes.
  template <int kHeadDim>
  using ItemsOfPlain =
      std::conditional_t<kFeature == Feature::kWraps || (kFeature == Feature::kKeyBias && kHeadDim < 64), Items,
                         PlainItems>;
};

}  // namespace natten_jax::small
