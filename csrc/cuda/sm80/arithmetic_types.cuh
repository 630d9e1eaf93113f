// Element type and product type (cuda/warp/mma.cuh) of an arithmetic.
#pragma once

#include <cuda_runtime_api.h>

#include <string>
#include <type_traits>

#include "cuda/common/cuda_status.h"
#include "cuda/common/launch.cuh"
#include "cuda/sm80/arithmetic.h"
#include "cuda/sm80/forms.h"
#include "cuda/warp/mma.cuh"

namespace natten_jax::sm80 {

template <Arithmetic kArithmetic>
struct ArithmeticTypes;
template <>
struct ArithmeticTypes<Arithmetic::kFloat16> {
  using Element = cutlass::half_t;
  using Product = HalfProduct<Element>;
};
template <>
struct ArithmeticTypes<Arithmetic::kBFloat16> {
  using Element = cutlass::bfloat16_t;
  using Product = HalfProduct<Element>;
};
template <>
struct ArithmeticTypes<Arithmetic::kFloat32> {
  using Element = float;
  using Product = FloatProduct<true>;
};
template <>
struct ArithmeticTypes<Arithmetic::kTensorFloat32> {
  using Element = float;
  using Product = FloatProduct<false>;
};

/// The form `Traits` of a kernel without key biases, and `KeyBiased<Traits>` with key biases.
template <class Traits, template <class> class KeyBiased, bool kHasKeyBias>
using WithKeyBias = std::conditional_t<kHasKeyBias, KeyBiased<Traits>, Traits>;

template <class Traits>
constexpr bool kFitsEverywhere = sizeof(typename Traits::SharedStorage) <= kLeastSharedMemory;

/// Error if a form of the tables in forms.h has no compiled kernel.
inline Status no_such_form(int head_dim) {
  return Status::internal("no kernel is compiled for heads of " + std::to_string(head_dim));
}

}  // namespace natten_jax::sm80
