// Instantiates the forward kernel for one type of 8-bit floats.
#pragma once

#include "cuda/common/constants.h"
#include "cuda/common/cuda_status.h"
#include "cuda/common/launch.cuh"
#include "cuda/sm90/fp8_forward.cuh"
#include "cuda/sm90/kernels.h"

namespace natten_jax::sm90 {

template <int kNumber, bool kPingPong>
Status launch_float8_form(const ForwardParams& params, int ctas, cudaStream_t stream) {
  constexpr Form kForm = kFloat8ForwardForms[kNumber];
  using Traits = Float8Traits<kForm.head_dim, kForm.keys, kPingPong>;
  static_assert(Traits::kRows == kForm.queries && sizeof(typename Traits::SharedStorage) <= kSharedMemory);
  return status_of(launch_form<Traits>(natten_jax_sm90_fna_forward_float8<Traits>, ctas, stream, params));
}

template <ElementType kType>
Status launch_float8_forward(const ForwardParams& params, int form, bool is_ping_pong, int ctas, cudaStream_t stream) {
  return with_form<kFloat8ForwardForms>(form, [&](auto number) {
    return is_ping_pong ? launch_float8_form<number, true>(params, ctas, stream)
                        : launch_float8_form<number, false>(params, ctas, stream);
  });
}

template Status launch_float8_forward<ElementType::NATTEN_JAX_INSTANCE>(const ForwardParams&, int, bool, int,
                                                                        cudaStream_t);

}  // namespace natten_jax::sm90
