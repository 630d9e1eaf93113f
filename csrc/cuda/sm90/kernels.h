// The compiled kernels, for each element type.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/sm90/params.h"
#include "natten_jax/problem.h"
#include "natten_jax/status.h"

namespace natten_jax::sm90 {

/// Launches a form of the forward kernel, by its number in kForwardForms, for 16-bit elements of one type. Fewer CTAs
/// than tiles walk over them.
template <ElementType kType>
Status launch_forward(const ForwardParams& params, int form, bool is_ping_pong, int ctas, cudaStream_t stream);

/// The same for plain problems (ForwardParams::is_plain) whose heads take all steps of the form's.
template <ElementType kType>
Status launch_plain_forward(const ForwardParams& params, int form, bool is_ping_pong, int ctas, cudaStream_t stream);

/// The same of the kernels that add biases of keys, which are compiled for warpgroups that take turns.
template <ElementType kType>
Status launch_key_biased_forward(const ForwardParams& params, int form, int ctas, cudaStream_t stream);

/// Launches a form of the forward kernel for 8-bit floats, by its number in kFloat8ForwardForms, likewise.
template <ElementType kType>
Status launch_float8_forward(const ForwardParams& params, int form, bool is_ping_pong, int ctas, cudaStream_t stream);

/// Launches a form of the backward kernel, by its number in kBackwardForms, for 16-bit elements of one type.
template <ElementType kType>
Status launch_backward(const BackwardParams& params, int form, cudaStream_t stream);

/// The same of the kernels that add biases of keys.
template <ElementType kType>
Status launch_key_biased_backward(const BackwardParams& params, int form, cudaStream_t stream);

}  // namespace natten_jax::sm90
