// Chooses and launches kernels with a ring (ring_shape.h).
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/small/ring_shape.h"
#include "natten_jax/arrays.h"
#include "natten_jax/problem.h"
#include "natten_jax/status.h"

namespace natten_jax::small {

/// True if a kernel uses a ring of this shape. If the shape has no compute warps, the kernel uses regions instead.
constexpr bool has_ring(const RingShape& shape) {
  return shape.warps > 0;
}

/// Chooses the ring of a forward pass on the current device.
Status find_forward_ring(const Problem& problem, const TileShapes& tiles, Coverage coverage, const Device& device,
                         RingShape& result);

/// Shapes of the two rings of a backward pass: for the kernel of query gradients, and for the kernel of key and value
/// gradients.
struct GradientRings {
  RingShape query_gradient, key_value_gradient;
};

/// Chooses the rings of a backward pass on the current device.
///
/// Args:
///   region_of_keys: region of the kernel of key and value gradients. The kernel uses this region unless a ring is
///     faster.
Status find_gradient_rings(const Problem& problem, const TileShapes& tiles, Coverage coverage, const Device& device,
                           const Region& region_of_keys, GradientRings& result);

/// Runs the forward pass of a checked problem on a stream, with a chosen shape.
Status run_ring_forward(const Problem& problem, const RingShape& shape, const Arrays& arrays, cudaStream_t stream);

/// Runs the kernel of query gradients. It also writes `statistics`, the statistics of queries: [batch, tokens, heads,
/// 4].
Status run_ring_query_gradient(const Problem& problem, const RingShape& shape, const Arrays& arrays, float* statistics,
                               cudaStream_t stream);

/// Runs the kernel of key and value gradients. The kernel of query gradients has to run first, because it writes
/// `statistics`.
Status run_ring_key_value_gradient(const Problem& problem, const RingShape& shape, const Arrays& arrays,
                                   const float* statistics, cudaStream_t stream);

}  // namespace natten_jax::small
