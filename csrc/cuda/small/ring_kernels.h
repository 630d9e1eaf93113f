// The compiled kernels with a ring.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/common/constants.h"
#include "cuda/common/launch.cuh"
#include "cuda/small/ring_params.h"

namespace natten_jax::small {

/// Launches the forward kernel for an element type of 16 bits and heads of 32 or 64.
template <ElementType kType>
cudaError_t launch_ring_forward(int head_dim, const RingForwardParams& params, const LaunchShape& shape);

}  // namespace natten_jax::small
