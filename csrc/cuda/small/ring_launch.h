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

/// Likewise the kernel of query gradients, which writes what is known of queries, [batch, tokens, heads, 4].
Status run_ring_query_gradient(const Problem& problem, const RingShape& shape, const Arrays& arrays, float* statistics,
                               cudaStream_t stream);

/// Likewise the kernel of key and value gradients, behind that of query gradients, which wrote what is known of
/// queries.
Status run_ring_key_value_gradient(const Problem& problem, const RingShape& shape, const Arrays& arrays,
                                   const float* statistics, cudaStream_t stream);

}  // namespace natten_jax::small
