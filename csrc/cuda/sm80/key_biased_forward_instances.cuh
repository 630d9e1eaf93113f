// Instantiates the forward kernel with key biases for one arithmetic.
#pragma once

#include "cuda/sm80/forward_forms.cuh"

namespace natten_jax::sm80 {

template <Arithmetic kArithmetic>
Status launch_key_biased_forward(const ForwardParams& params, const ForwardForm& form, const SharedMemory& memory,
                                 int ctas, cudaStream_t stream) {
  return launch_forward_form<kArithmetic, true>(params, form, memory, ctas, stream);
}

template Status launch_key_biased_forward<Arithmetic::NATTEN_JAX_INSTANCE>(const ForwardParams&, const ForwardForm&,
                                                                           const SharedMemory&, int, cudaStream_t);

}  // namespace natten_jax::sm80
