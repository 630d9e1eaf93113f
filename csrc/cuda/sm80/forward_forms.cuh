// Launch and instantiation of the forms (compiled variants) of the forward kernel.
#pragma once

#include "cuda/sm80/arithmetic_types.cuh"
#include "cuda/sm80/forward.cuh"
#include "cuda/sm80/kernels.h"

namespace natten_jax::sm80 {

/// A variant of a form: its number of stages, and whether it adds key biases.
template <Arithmetic kArithmetic, bool kHasKeyBias, int kHeadDim, int kColumns, int kStages, int kWarps = 4>
using Variant =
    WithKeyBias<ForwardTraits<typename ArithmeticTypes<kArithmetic>::Element,
                              typename ArithmeticTypes<kArithmetic>::Product, kHeadDim, kColumns, kStages, kWarps>,
                KeyBiased, kHasKeyBias>;

/// Launches a variant of a form.
template <class Traits>
Status launch_variant(const ForwardParams& params, int ctas, cudaStream_t stream) {
  // Calls with key biases have no separate kernel for plain launches, because that kernel would have the same step
  // loop.
  constexpr bool kHasPlain = !Traits::kHasKeyBias;
  const auto kernel =
      is_plain(params) ? natten_jax_sm80_fna_forward<Traits, kHasPlain> : natten_jax_sm80_fna_forward<Traits, false>;
  return status_of(launch_form<Traits>(kernel, ctas, stream, params));
}

/// Launches the first variant of which two CTAs fit on an SM. If there is none, launches the first variant of which one
/// CTA fits.
template <class... Variants>
Status launch_fitting(const ForwardParams& params, const SharedMemory& memory, int ctas, cudaStream_t stream) {
  static_assert((kFitsEverywhere<Variants> || ...));
  Status result = Status::invalid_argument(kTooLittleSharedMemory);
  bool is_launched = false;
  for (const int per_multiprocessor : {2, 1}) {
    const auto try_variant = [&](auto traits) {
      using Traits = decltype(traits);
      constexpr int kBytes = sizeof(typename Traits::SharedStorage);
      if (is_launched || kBytes > memory.block ||
          per_multiprocessor * (kBytes + memory.reserved) > memory.multiprocessor) {
        return;
      }
      is_launched = true;
      result = launch_variant<Traits>(params, ctas, stream);
    };
    (try_variant(Variants{}), ...);
  }
  return result;
}

/// Launches a form, with or without key biases.
template <Arithmetic kArithmetic, bool kHasKeyBias>
Status launch_forward_form(const ForwardParams& params, const ForwardForm& form, const SharedMemory& memory, int ctas,
                           cudaStream_t stream) {
  using Element = typename ArithmeticTypes<kArithmetic>::Element;
  constexpr int kColumns = sizeof(Element) == 4 ? 32 : 64;
  switch (form.head_dim) {
    case 64:
      return launch_fitting<Variant<kArithmetic, kHasKeyBias, 64, kColumns, 2>,
                            Variant<kArithmetic, kHasKeyBias, 64, kColumns, 1>>(params, memory, ctas, stream);
    case 128:
      if constexpr (sizeof(Element) == 2) {
        using Wide = Variant<kArithmetic, kHasKeyBias, kWideForm.head_dim, kColumns, 4, 8>;
        static_assert(Wide::kRows == kWideForm.queries &&
                      sizeof(typename Wide::SharedStorage) <= kWideForm.shared_memory);
        if (form.queries == kWideForm.queries) return launch_variant<Wide>(params, ctas, stream);
      }
      return launch_fitting<Variant<kArithmetic, kHasKeyBias, 128, kColumns, 2>,
                            Variant<kArithmetic, kHasKeyBias, 128, kColumns, 1>>(params, memory, ctas, stream);
    case 256: {
      constexpr int kStages = sizeof(Element) == 4 ? 1 : 2;
      return launch_fitting<Variant<kArithmetic, kHasKeyBias, 256, kColumns / 2, kStages>,
                            Variant<kArithmetic, kHasKeyBias, 256, kColumns / 2, kStages - 1>>(params, memory, ctas,
                                                                                               stream);
    }
  }
  return no_such_form(form.head_dim);
}

}  // namespace natten_jax::sm80
