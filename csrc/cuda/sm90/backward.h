// The compiled forms of the backward kernel.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/sm90/backward_params.h"

namespace natten_jax::sm90 {

/// Launches the form for 16-bit elements of one type; `head_dim` must be one that is compiled.
template <bool kIsBFloat16>
cudaError_t launch_backward(const BackwardParams& params, int head_dim, cudaStream_t stream);

extern template cudaError_t launch_backward<false>(const BackwardParams&, int, cudaStream_t);
extern template cudaError_t launch_backward<true>(const BackwardParams&, int, cudaStream_t);

}  // namespace natten_jax::sm90
