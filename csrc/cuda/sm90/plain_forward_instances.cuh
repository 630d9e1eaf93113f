// Instantiates, for one element type, the forward kernel that supports only plain problems.
#pragma once

#include "cuda/sm90/forward_forms.cuh"

namespace natten_jax::sm90 {

template <ElementType kType>
Status launch_plain_forward(const ForwardParams& params, int form, bool is_ping_pong, int ctas, cudaStream_t stream) {
  return with_form<kForwardForms>(form, [&](auto number) {
    constexpr Form kForm = kForwardForms[number];
    const auto launch = [&](auto ping_pong) {
      return launch_traits<ForwardTraits<ElementOf<kType>, kForm.head_dim, kForm.keys, kForm.queries / 64, ping_pong,
                                         false, false, true>>(params, ctas, stream);
    };
    return is_ping_pong ? launch(std::true_type{}) : launch(std::false_type{});
  });
}

template Status launch_plain_forward<ElementType::NATTEN_JAX_INSTANCE>(const ForwardParams&, int, bool, int,
                                                                       cudaStream_t);

}  // namespace natten_jax::sm90
