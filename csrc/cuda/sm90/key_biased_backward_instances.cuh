// Instantiates the backward kernel with key biases for one element type.
#pragma once

#include "cuda/sm90/backward_forms.cuh"

namespace natten_jax::sm90 {

template <ElementType kType>
Status launch_key_biased_backward(const BackwardParams& params, int form, cudaStream_t stream) {
  return launch_backward_form<kType, true>(params, form, stream);
}

template Status launch_key_biased_backward<ElementType::NATTEN_JAX_INSTANCE>(const BackwardParams&, int, cudaStream_t);

}  // namespace natten_jax::sm90
