// Instantiates the backward kernel with key biases for one arithmetic.
#pragma once

#include "cuda/sm80/backward_forms.cuh"

namespace natten_jax::sm80 {

template <Arithmetic kArithmetic>
Status launch_key_biased_backward(const BackwardParams& params, const BackwardForm& form, int ctas,
                                  cudaStream_t stream) {
  return launch_backward_form<kArithmetic, true>(params, form, ctas, stream);
}

template Status launch_key_biased_backward<Arithmetic::NATTEN_JAX_INSTANCE>(const BackwardParams&, const BackwardForm&,
                                                                            int, cudaStream_t);

}  // namespace natten_jax::sm80
