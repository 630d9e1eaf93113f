// Which template arguments of the kernels a feature is.
#pragma once

#include <type_traits>

#include "cuda/small/kernels.h"
#include "cuda/small/seams.cuh"

namespace natten_jax::small {

template <Feature kFeature>
struct FeatureTraits {
  using Items = std::conditional_t<kFeature == Feature::kWraps, AroundItems, CtaItems>;
  // Of forward passes where the arrays are the whole layout. With biases of keys, the compiler has no room for them
  // where heads are narrow: it would spill 56 bytes.
  template <int kHeadDim>
  using WholeItems = std::conditional_t<kFeature == Feature::kWraps || (kFeature == Feature::kKeyBias && kHeadDim < 64),
                                        Items, PlainItems>;
};

}  // namespace natten_jax::small
