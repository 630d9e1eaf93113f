// Element and product types of an arithmetic, and how a kernel is launched.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/sm80/arithmetic.h"
#include "cuda/sm80/products.cuh"

namespace natten_jax::sm80 {

template <Arithmetic kArithmetic>
struct OfArithmetic {
  using Element = std::conditional_t<kArithmetic == Arithmetic::kBFloat16, cutlass::bfloat16_t, cutlass::half_t>;
  using Product = HalfProduct<Element>;
};
template <>
struct OfArithmetic<Arithmetic::kFloat32> {
  using Element = float;
  using Product = FloatProduct<true>;
};
template <>
struct OfArithmetic<Arithmetic::kTensorFloat32> {
  using Element = float;
  using Product = FloatProduct<false>;
};

/// Bytes of shared memory that a CTA may have on every GPU since Ampere.
constexpr int kLeastSharedMemory = 99 << 10;

template <class Traits>
constexpr bool kFitsEverywhere = sizeof(typename Traits::SharedStorage) <= kLeastSharedMemory;

/// Launches `kernel`, the form of a kernel for `Traits`.
template <class Traits, class Params>
cudaError_t launch(void (*kernel)(Params), const Params& params, int ctas, cudaStream_t stream) {
  constexpr int kSharedMemory = sizeof(typename Traits::SharedStorage);
  if (const auto error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedMemory)) {
    return error;
  }
  kernel<<<ctas, Traits::kThreads, kSharedMemory, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace natten_jax::sm80
