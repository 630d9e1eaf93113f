// The compiled kernels, per element type.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/sm90/params.h"
#include "natten_jax/problem.h"
#include "natten_jax/status.h"

namespace natten_jax::sm90 {

/// Launches a form of the forward kernel, by its number in kForwardForms, for a 16-bit element type. With fewer CTAs
/// than query tiles, each CTA processes several tiles.
template <ElementType kType>
Status launch_forward(const ForwardParams& params, int form, bool is_ping_pong, int ctas, cudaStream_t stream);

/// Launches the forward kernel for plain problems (ForwardParams::is_plain) whose heads take all k-steps of the form.
template <ElementType kType>
Status launch_plain_forward(const ForwardParams& params, int form, bool is_ping_pong, int ctas, cudaStream_t stream);

/// Launches the forward kernel with key biases, which is compiled only for ping-pong scheduling.
template <ElementType kType>
Status launch_key_biased_forward(const ForwardParams& params, int form, int ctas, cudaStream_t stream);

/// Launches a form of the forward kernel for 8-bit floats, by its number in kFloat8ForwardForms.
template <ElementType kType>
Status launch_float8_forward(const ForwardParams& params, int form, bool is_ping_pong, int ctas, cudaStream_t stream);

/// Launches a form of the backward kernel, by its number in kBackwardForms, for a 16-bit element type.
template <ElementType kType>
Status launch_backward(const BackwardParams& params, int form, cudaStream_t stream);

/// Launches the backward kernel with key biases.
template <ElementType kType>
Status launch_key_biased_backward(const BackwardParams& params, int form, cudaStream_t stream);

}  // namespace natten_jax::sm90
