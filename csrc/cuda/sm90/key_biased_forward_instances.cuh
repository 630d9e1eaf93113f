// Instantiates the forward kernel with key biases for one element type.
#pragma once

#include "cuda/sm90/forward_forms.cuh"

namespace natten_jax::sm90 {

/// Plain problems whose heads are not narrow (`is_narrow`) have a separate kernel, as without key biases. All other
/// problems use the kernel for narrow heads, which supports heads of any width up to the form's maximum.
template <ElementType kType>
Status launch_key_biased_forward(const ForwardParams& params, int form, int ctas, cudaStream_t stream) {
  return with_form<kForwardForms>(form, [&](auto number) {
    constexpr Form kForm = kForwardForms[number];
    const auto launch = [&](auto plain) {
      return launch_traits<
          ForwardTraits<ElementOf<kType>, kForm.head_dim, kForm.keys, kForm.queries / 64, true, !plain, true, plain>>(
          params, ctas, stream);
    };
    return params.is_plain && !is_narrow(params.head_dim, kForm.head_dim) ? launch(std::true_type{})
                                                                          : launch(std::false_type{});
  });
}

template Status launch_key_biased_forward<ElementType::NATTEN_JAX_INSTANCE>(const ForwardParams&, int, int,
                                                                            cudaStream_t);

}  // namespace natten_jax::sm90
