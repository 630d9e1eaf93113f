// Precision of the matrix products of a launch.
#pragma once

#include "cuda/common/constants.h"

namespace natten_jax::sm80 {

enum class Arithmetic { kFloat16, kBFloat16, kFloat32, kTensorFloat32 };

/// True if array elements have 16 bits. Only kernels for 16-bit elements support key biases.
constexpr bool is_half(Arithmetic arithmetic) {
  return arithmetic == Arithmetic::kFloat16 || arithmetic == Arithmetic::kBFloat16;
}

/// Calls `call` with the arithmetic of the problem's products as a compile-time constant. Products of float32 elements
/// are computed in TF32 unless `is_accurate`.
template <class Call>
Status with_arithmetic(ElementType type, bool is_accurate, const Call& call) {
  const Arithmetic float32_arithmetic = is_accurate ? Arithmetic::kFloat32 : Arithmetic::kTensorFloat32;
  const Arithmetic arithmetic = type == ElementType::kFloat16    ? Arithmetic::kFloat16
                                : type == ElementType::kBFloat16 ? Arithmetic::kBFloat16
                                                                 : float32_arithmetic;
  return with_constant<Arithmetic::kFloat16, Arithmetic::kBFloat16, Arithmetic::kFloat32, Arithmetic::kTensorFloat32>(
      arithmetic, no_such_elements(type), call);
}

}  // namespace natten_jax::sm80
