// Instantiates the forward kernel for one arithmetic.
#pragma once

#include "cuda/sm80/forward.cuh"
#include "cuda/sm80/forward.h"
#include "cuda/sm80/of_arithmetic.cuh"

namespace natten_jax::sm80 {

/// Launches the first of some forms of which two CTAs fit on a multiprocessor, or else the first of which one does.
template <class... Forms>
cudaError_t launch_fitting(const ForwardParams& params, const SharedMemory& memory, int ctas, cudaStream_t stream) {
  static_assert((kFitsEverywhere<Forms> || ...));
  cudaError_t result = cudaErrorInvalidConfiguration;  // none fits
  bool is_launched = false;
  for (const int per_multiprocessor : {2, 1}) {
    const auto try_form = [&](auto traits) {
      using Traits = decltype(traits);
      constexpr int kBytes = sizeof(typename Traits::SharedStorage);
      if (is_launched || kBytes > memory.block ||
          per_multiprocessor * (kBytes + memory.reserved) > memory.multiprocessor) {
        return;
      }
      is_launched = true;
      result = launch<Traits>(natten_jax_sm80_fna_forward<Traits>, params, ctas, stream);
    };
    (try_form(Forms{}), ...);
  }
  return result;
}

template <Arithmetic kArithmetic>
cudaError_t launch_forward(const ForwardParams& params, int head_dim, const SharedMemory& memory, int ctas,
                           cudaStream_t stream) {
  using Element = typename OfArithmetic<kArithmetic>::Element;
  using Product = typename OfArithmetic<kArithmetic>::Product;
  constexpr int kColumns = sizeof(Element) == 4 ? 32 : 64;
  if (head_dim == 64) {
    return launch_fitting<ForwardTraits<Element, Product, 64, kColumns, 2>,
                          ForwardTraits<Element, Product, 64, kColumns, 1>>(params, memory, ctas, stream);
  }
  if (head_dim == 128) {
    using TwoStages = ForwardTraits<Element, Product, 128, kColumns, 2>;
    if constexpr (sizeof(Element) == 2) {
      using Wide = ForwardTraits<Element, Product, kWideFormHeadDim, kColumns, 4, 8>;
      static_assert(Wide::kRows == kWideFormRows && sizeof(typename Wide::SharedStorage) <= kWideFormSharedMemory);
      if (params.q_tile_tokens > TwoStages::kRows) {
        return launch<Wide>(natten_jax_sm80_fna_forward<Wide>, params, ctas, stream);
      }
    }
    return launch_fitting<TwoStages, ForwardTraits<Element, Product, 128, kColumns, 1>>(params, memory, ctas, stream);
  }
  constexpr int kStages = sizeof(Element) == 4 ? 1 : 2;
  return launch_fitting<ForwardTraits<Element, Product, 256, kColumns / 2, kStages>,
                        ForwardTraits<Element, Product, 256, kColumns / 2, kStages - 1>>(params, memory, ctas, stream);
}

}  // namespace natten_jax::sm80
