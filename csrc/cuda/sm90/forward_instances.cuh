// Instantiates the forward kernel for one element type.
#pragma once

#include "cuda/sm90/forward_forms.cuh"

namespace natten_jax::sm90 {

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
