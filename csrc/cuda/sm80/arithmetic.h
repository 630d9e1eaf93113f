// What the products of a launch are computed in.
#pragma once

#include "cuda/common/element_types.h"

namespace natten_jax::sm80 {

enum class Arithmetic { kFloat16, kBFloat16, kFloat32, kTensorFloat32 };

/// Calls `call` with the arithmetic of a problem's products as a constant; those of float32 elements are computed in
/// TF32 unless `is_accurate`.
template <class Call>
Status with_arithmetic(ElementType type, bool is_accurate, const Call& call) {
  switch (type) {
    case ElementType::kFloat16:
      return call(std::integral_constant<Arithmetic, Arithmetic::kFloat16>{});
    case ElementType::kBFloat16:
      return call(std::integral_constant<Arithmetic, Arithmetic::kBFloat16>{});
    case ElementType::kFloat32:
      return is_accurate ? call(std::integral_constant<Arithmetic, Arithmetic::kFloat32>{})
                         : call(std::integral_constant<Arithmetic, Arithmetic::kTensorFloat32>{});
  }
  return no_such_elements(type);
}

}  // namespace natten_jax::sm80
