// Launches the kernels with a ring of keys.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/small/ring_shape.h"
#include "natten_jax/arrays.h"
#include "natten_jax/problem.h"
#include "natten_jax/status.h"

namespace natten_jax::small {

/// Runs the forward pass of a checked problem on a stream, in a shape that was chosen for it.
Status run_ring_forward(const Problem& problem, const RingShape& shape, const Arrays& arrays, cudaStream_t stream);

}  // namespace natten_jax::small
