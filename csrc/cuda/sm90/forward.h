// The compiled forms of the forward kernel.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/sm90/params.h"

namespace natten_jax::sm90 {

/// Launches the form for 16-bit elements of one type; `columns` and `head_dim` must be one of the compiled pairs.
/// Fewer CTAs than tiles walk over them.
template <bool kIsBFloat16>
cudaError_t launch_forward(const ForwardParams& params, int head_dim, int columns, bool is_ping_pong, int ctas,
                           cudaStream_t stream);

extern template cudaError_t launch_forward<false>(const ForwardParams&, int, int, bool, int, cudaStream_t);
extern template cudaError_t launch_forward<true>(const ForwardParams&, int, int, bool, int, cudaStream_t);

}  // namespace natten_jax::sm90
