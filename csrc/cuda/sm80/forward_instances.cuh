// Instantiates the forward kernel for one arithmetic.
#pragma once

#include "cuda/sm80/forward.cuh"
#include "cuda/sm80/forward.h"

namespace natten_jax::sm80 {

template <class Traits>
cudaError_t launch(const ForwardParams& params, int ctas, cudaStream_t stream) {
  const auto kernel = natten_jax_sm80_fna_forward<Traits>;
  constexpr int kSharedMemory = sizeof(typename Traits::SharedStorage);
  if (const auto error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedMemory)) {
    return error;
  }
  kernel<<<ctas, Traits::kThreads, kSharedMemory, stream>>>(params);
  return cudaGetLastError();
}

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

template <Arithmetic kArithmetic>
cudaError_t launch_forward(const ForwardParams& params, int head_dim, int ctas, cudaStream_t stream) {
  using Element = typename OfArithmetic<kArithmetic>::Element;
  using Product = typename OfArithmetic<kArithmetic>::Product;
  constexpr bool kIsWide = sizeof(Element) == 4;
  if (head_dim == 64) {
    return launch<ForwardTraits<Element, Product, 64, kIsWide ? 32 : 64>>(params, ctas, stream);
  }
  if (head_dim == 128) {
    return launch<ForwardTraits<Element, Product, 128, kIsWide ? 32 : 64>>(params, ctas, stream);
  }
  return launch<ForwardTraits<Element, Product, 256, kIsWide ? 16 : 32>>(params, ctas, stream);
}

}  // namespace natten_jax::sm80
