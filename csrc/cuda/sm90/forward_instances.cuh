// Instantiates the forward kernel for one element type.
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

/// By the width of heads.
template <class Element, int kNumber, bool kPingPong>
Status launch_width(const ForwardParams& params, int ctas, cudaStream_t stream) {
  constexpr Form kForm = kForwardForms[kNumber];
  constexpr int kWarpgroups = kForm.queries / 64;
  return is_narrow(params.head_dim, kForm.head_dim)
             ? launch_traits<ForwardTraits<Element, kForm.head_dim, kForm.keys, kWarpgroups, kPingPong, true>>(
                   params, ctas, stream)
             : launch_traits<ForwardTraits<Element, kForm.head_dim, kForm.keys, kWarpgroups, kPingPong, false>>(
                   params, ctas, stream);
}

template <ElementType kType>
Status launch_forward(const ForwardParams& params, int form, bool is_ping_pong, int ctas, cudaStream_t stream) {
  return with_form<kForwardForms>(form, [&](auto number) {
    using Element = ElementOf<kType>;
    return is_ping_pong ? launch_width<Element, number, true>(params, ctas, stream)
                        : launch_width<Element, number, false>(params, ctas, stream);
  });
}

template Status launch_forward<ElementType::NATTEN_JAX_INSTANCE>(const ForwardParams&, int, bool, int, cudaStream_t);

}  // namespace natten_jax::sm90
