// The compiled forms of the backward kernel.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/sm80/arithmetic.h"
#include "cuda/sm80/forms.h"
#include "cuda/sm80/params.h"
#include "natten_jax/status.h"

namespace natten_jax::sm80 {

/// Launches a form on `ctas` CTAs.
template <Arithmetic kArithmetic>
Status launch_backward(const BackwardParams& params, const BackwardForm& form, int ctas, cudaStream_t stream);

}  // namespace natten_jax::sm80
