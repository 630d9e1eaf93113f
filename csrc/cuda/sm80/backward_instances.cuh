// Instantiates the backward kernel for one arithmetic.
#pragma once

#include "cuda/sm80/backward.cuh"
#include "cuda/sm80/backward.h"
#include "cuda/sm80/of_arithmetic.cuh"

namespace natten_jax::sm80 {

template <Arithmetic kArithmetic>
cudaError_t launch_backward(const BackwardParams& params, int head_dim, int keys, int ctas, cudaStream_t stream) {
  using Element = typename OfArithmetic<kArithmetic>::Element;
  using Product = typename OfArithmetic<kArithmetic>::Product;
  const auto run = [&](auto traits) {
    using Traits = decltype(traits);
    return launch<Traits>(natten_jax_sm80_fna_backward<Traits>, params, ctas, stream);
  };
  const auto run_anywhere = [&](auto traits) {
    static_assert(kFitsEverywhere<decltype(traits)>);
    return run(traits);
  };
  if constexpr (sizeof(Element) == 4) {
    using Two = WarpGrid<2, 2>;
    if (head_dim == 64) {
      return run_anywhere(
          BackwardTraits<Element, Product, 64, 64, 32, 2, WarpGrid<4, 2>, WarpGrid<4, 2>, WarpGrid<2, 4>>{});
    }
    if (head_dim == 128) return run_anywhere(BackwardTraits<Element, Product, 128, 32, 32, 1, Two, Two, Two>{});
    if (keys == 32) return run(BackwardTraits<Element, Product, 256, 32, 32, 1, Two, Two, Two>{});
    return run_anywhere(
        BackwardTraits<Element, Product, 256, 16, 16, 1, WarpGrid<1, 1>, WarpGrid<1, 4>, WarpGrid<1, 4>>{});
  } else {
    using Two = WarpGrid<2, 2>;
    using Wide = WarpGrid<4, 2>;
    if (head_dim == 64) {
      return run_anywhere(BackwardTraits<Element, Product, 64, 128, 64, 1, Wide, Wide, WarpGrid<2, 4>>{});
    }
    if (head_dim == 128 && keys == 128) {
      return run(BackwardTraits<Element, Product, 128, 128, 64, 2, Wide, Wide, WarpGrid<2, 4>>{});
    }
    if (head_dim == 128) return run_anywhere(BackwardTraits<Element, Product, 128, 64, 32, 2, Two, Two, Two>{});
    if (keys == 32) return run_anywhere(BackwardTraits<Element, Product, 256, 32, 32, 1, Two, Two, Two>{});
    return run(BackwardTraits<Element, Product, 256, 64, 32, 1, Wide, WarpGrid<2, 4>, WarpGrid<2, 4>>{});
  }
}

}  // namespace natten_jax::sm80
