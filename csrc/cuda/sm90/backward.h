// The compiled forms of the backward kernel.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/sm90/backward_params.h"
#include "natten_jax/problem.h"
#include "natten_jax/status.h"

namespace natten_jax::sm90 {

/// Launches a form, by its number in kBackwardForms, for 16-bit elements of one type.
template <ElementType kType>
Status launch_backward(const BackwardParams& params, int form, cudaStream_t stream);

}  // namespace natten_jax::sm90
