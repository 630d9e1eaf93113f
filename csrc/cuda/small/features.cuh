// Which template arguments of the kernels a feature is.
#pragma once

#include <type_traits>

#include "cuda/small/kernels.h"
#include "cuda/small/seams.cuh"

namespace natten_jax::small {

template <Feature kFeature>
struct FeatureTraits {
  static constexpr bool kHasBias = kFeature == Feature::kRelativeBias;
  static constexpr bool kHasKeyBias = kFeature == Feature::kKeyBias;
  using Items = std::conditional_t<kFeature == Feature::kWraps, AroundItems, CtaItems>;
  // Of forward passes where the arrays are the whole layout. With biases of keys, the compiler has no room for them
  // then: heads of 32 would spill 56 bytes.
  using WholeItems =
      std::conditional_t<kFeature == Feature::kNone || kFeature == Feature::kRelativeBias, PlainItems, Items>;
};

}  // namespace natten_jax::small
