// Launch and instantiation of the forms (compiled variants) of the backward kernel.
#pragma once

#include "cuda/sm80/arithmetic_types.cuh"
#include "cuda/sm80/backward.cuh"
#include "cuda/sm80/kernels.h"

namespace natten_jax::sm80 {

/// Launches a form of the kernel, with or without key biases.
template <Arithmetic kArithmetic, bool kHasKeyBias>
Status launch_backward_form(const BackwardParams& params, const BackwardForm& form, int ctas, cudaStream_t stream) {
  using Element = typename ArithmeticTypes<kArithmetic>::Element;
  using Product = typename ArithmeticTypes<kArithmetic>::Product;
  Status result = no_such_form(form.head_dim);
  const auto run = [&](auto traits) {
    using Traits = WithKeyBias<decltype(traits), BackwardKeyBiased, kHasKeyBias>;
    static_assert(
        has_backward_form(Traits::kHeadDim, sizeof(Element), Traits::kKeys, sizeof(typename Traits::SharedStorage)));
    if (form.head_dim == Traits::kHeadDim && form.keys == Traits::kKeys) {
      // Only 16-bit calls without key biases have a separate kernel for plain launches. Float32 calls need none,
      // because they are slow and spend most of their time in products.
      constexpr bool kHasPlain = sizeof(Element) == 2 && !kHasKeyBias;
      const auto kernel = is_plain(params) ? natten_jax_sm80_fna_backward<Traits, kHasPlain>
                                           : natten_jax_sm80_fna_backward<Traits, false>;
      result = status_of(launch_form<Traits>(kernel, ctas, stream, params));
    }
  };
  const auto run_anywhere = [&](auto traits) {
    static_assert(kFitsEverywhere<WithKeyBias<decltype(traits), BackwardKeyBiased, kHasKeyBias>>);
    run(traits);
  };
  using Two = WarpGrid<2, 2>;
  using Wide = WarpGrid<4, 2>;
  if constexpr (sizeof(Element) == 4) {
    run_anywhere(BackwardTraits<Element, Product, 64, 64, 32, 2, Wide, Wide, WarpGrid<2, 4>>{});
    run_anywhere(BackwardTraits<Element, Product, 128, 32, 32, 1, Two, Two, Two>{});
    run(BackwardTraits<Element, Product, 256, 32, 32, 1, Two, Two, Two>{});
    run_anywhere(BackwardTraits<Element, Product, 256, 16, 16, 1, WarpGrid<1, 1>, WarpGrid<1, 4>, WarpGrid<1, 4>>{});
  } else {
    run_anywhere(BackwardTraits<Element, Product, 64, 128, 64, 1, Wide, Wide, WarpGrid<2, 4>>{});
    run(BackwardTraits<Element, Product, 128, 128, 64, 2, Wide, Wide, WarpGrid<2, 4>>{});
    run_anywhere(BackwardTraits<Element, Product, 128, 64, 32, 2, Two, Two, Two>{});
    run(BackwardTraits<Element, Product, 256, 64, 32, 1, Wide, WarpGrid<2, 4>, WarpGrid<2, 4>>{});
    run_anywhere(BackwardTraits<Element, Product, 256, 32, 32, 1, Two, Two, Two>{});
  }
  return result;
}

}  // namespace natten_jax::sm80
