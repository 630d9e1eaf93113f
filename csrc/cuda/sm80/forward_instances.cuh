// Instantiates the forward kernel for one arithmetic.
#pragma once

#include "cuda/sm80/forward.cuh"
#include "cuda/sm80/forward.h"
#include "cuda/sm80/of_arithmetic.cuh"

namespace natten_jax::sm80 {

template <Arithmetic kArithmetic>
cudaError_t launch_forward(const ForwardParams& params, int head_dim, int ctas, cudaStream_t stream) {
  using Element = typename OfArithmetic<kArithmetic>::Element;
  using Product = typename OfArithmetic<kArithmetic>::Product;
  constexpr bool kIsWide = sizeof(Element) == 4;
  const auto run = [&](auto traits) {
    using Traits = decltype(traits);
    return launch<Traits>(natten_jax_sm80_fna_forward<Traits>, params, ctas, stream);
  };
  if (head_dim == 64) return run(ForwardTraits<Element, Product, 64, kIsWide ? 32 : 64>{});
  if (head_dim == 128) return run(ForwardTraits<Element, Product, 128, kIsWide ? 32 : 64>{});
  return run(ForwardTraits<Element, Product, 256, kIsWide ? 16 : 32>{});
}

}  // namespace natten_jax::sm80
