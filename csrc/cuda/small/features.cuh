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
};

}  // namespace natten_jax::small
