// Instantiates the forward kernel that adds biases of keys for one element type.
#pragma once

#include "cuda/sm90/forward_forms.cuh"

namespace natten_jax::sm90 {

template <ElementType kType>
Status launch_key_biased_forward(const ForwardParams& params, int form, int ctas, cudaStream_t stream) {
  return with_form<kForwardForms>(
      form, [&](auto number) { return launch_width<ElementOf<kType>, number, true, true>(params, ctas, stream); });
}

template Status launch_key_biased_forward<ElementType::NATTEN_JAX_INSTANCE>(const ForwardParams&, int, int,
                                                                            cudaStream_t);

}  // namespace natten_jax::sm90
