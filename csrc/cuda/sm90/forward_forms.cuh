// Launch and instantiation of the forms (compiled variants) of the forward kernel.
#pragma once

#include "cuda/common/arithmetic.cuh"
#include "cuda/common/constants.h"
#include "cuda/common/cuda_status.h"
#include "cuda/common/launch.cuh"
#include "cuda/sm90/forward.cuh"
#include "cuda/sm90/kernels.h"

namespace natten_jax::sm90 {

template <class Traits>
Status launch_traits(const ForwardParams& params, int ctas, cudaStream_t stream) {
  static_assert(sizeof(typename Traits::SharedStorage) <= kSharedMemory);
  return status_of(launch_form<Traits>(natten_jax_sm90_fna_forward<Traits>, ctas, stream, params));
}

/// Launches the kernel for narrow heads if the heads are narrow (`is_narrow`), otherwise the kernel for full heads.
template <class Element, int kNumber, bool kPingPong>
Status launch_width(const ForwardParams& params, int ctas, cudaStream_t stream) {
  constexpr Form kForm = kForwardForms[kNumber];
  const auto launch = [&](auto narrow) {
    return launch_traits<ForwardTraits<Element, kForm.head_dim, kForm.keys, kForm.queries / 64, kPingPong, narrow>>(
        params, ctas, stream);
  };
  return is_narrow(params.head_dim, kForm.head_dim) ? launch(std::true_type{}) : launch(std::false_type{});
}

}  // namespace natten_jax::sm90
