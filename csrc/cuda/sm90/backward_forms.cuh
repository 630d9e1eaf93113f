// Launch and instantiation of the forms (compiled variants) of the backward kernel.
#pragma once

#include <algorithm>

#include "cuda/common/arithmetic.cuh"
#include "cuda/common/constants.h"
#include "cuda/common/cuda_status.h"
#include "cuda/common/geometry.h"
#include "cuda/common/launch.cuh"
#include "cuda/sm90/backward.cuh"
#include "cuda/sm90/kernels.h"

namespace natten_jax::sm90 {

/// Launches a kernel of form number `form` of kBackwardForms. A form has several kernels:
///
///   for plain problems     used for plain problems whose heads are not narrow (`is_narrow`)
///   for narrow heads       used for narrow heads; supports all problems
///   for full heads         used for other problems whose heads are not narrow. With key biases, this kernel is not
///                          compiled, and the kernel for narrow heads is used instead.
template <ElementType kType, bool kHasKeyBias>
Status launch_backward_form(const BackwardParams& params, int form, cudaStream_t stream) {
  int multiprocessors = 0;
  NATTEN_JAX_RETURN_IF_FAILED(read_attributes({{&multiprocessors, cudaDevAttrMultiProcessorCount}}));
  const int blocks = std::min(params.schedule.tiles, multiprocessors);
  return with_form<kBackwardForms>(form, [&](auto number) {
    constexpr Form kForm = kBackwardForms[number];
    constexpr int kStages = kForm.head_dim == 256 ? 1 : 2;
    const auto launch_traits = [&](auto narrow, auto plain) {
      using Traits = BackwardTraits<ElementOf<kType>, kForm.head_dim, kForm.keys, kForm.queries, kStages, narrow,
                                    kHasKeyBias, plain>;
      static_assert(sizeof(typename Traits::SharedStorage) <= kSharedMemory);
      return status_of(launch_form<Traits>(natten_jax_sm90_backward<Traits>, blocks, stream, params, true));
    };
    const bool narrow = is_narrow(std::min(params.head_dim, params.head_dim_v), kForm.head_dim);
    if (params.is_plain && !narrow) return launch_traits(std::false_type{}, std::true_type{});
    return narrow ? launch_traits(std::true_type{}, std::false_type{})
                  : launch_traits(std::bool_constant<kHasKeyBias>{}, std::false_type{});
  });
}

}  // namespace natten_jax::sm90
