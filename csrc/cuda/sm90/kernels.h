// Functions that launch the compiled kernels. Each function is instantiated separately for every element type.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/sm90/params.h"
#include "natten_jax/problem.h"
#include "natten_jax/status.h"

namespace natten_jax::sm90 {

/// Launches the forward kernel for a 16-bit element type. `form` is the index of its form in kForwardForms. If there
/// are fewer CTAs than query tiles, each CTA processes several tiles.
template <ElementType kType>
Status launch_forward(const ForwardParams& params, int form, bool is_ping_pong, int ctas, cudaStream_t stream);

/// Launches the forward kernel that supports only plain problems (ForwardParams::is_plain) with heads that are not
/// narrow (`is_narrow`).
template <ElementType kType>
Status launch_plain_forward(const ForwardParams& params, int form, bool is_ping_pong, int ctas, cudaStream_t stream);

/// Launches the forward kernel with key biases. It always uses ping-pong scheduling.
template <ElementType kType>
Status launch_key_biased_forward(const ForwardParams& params, int form, int ctas, cudaStream_t stream);

/// Launches the forward kernel for 8-bit floats. `form` is the index of its form in kFloat8ForwardForms.
template <ElementType kType>
Status launch_float8_forward(const ForwardParams& params, int form, bool is_ping_pong, int ctas, cudaStream_t stream);

/// Launches the backward kernel for a 16-bit element type. `form` is the index of its form in kBackwardForms.
template <ElementType kType>
Status launch_backward(const BackwardParams& params, int form, cudaStream_t stream);

/// Launches the backward kernel with key biases.
template <ElementType kType>
Status launch_key_biased_backward(const BackwardParams& params, int form, cudaStream_t stream);

}  // namespace natten_jax::sm90
