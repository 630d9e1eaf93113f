// Launches the kernels with a ring of keys.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/small/ring_shape.h"
#include "natten_jax/arrays.h"
#include "natten_jax/problem.h"
#include "natten_jax/status.h"

namespace natten_jax::small {

/// Whether a shape is one: those without warps say that the kernel goes with regions.
constexpr bool has_ring(const RingShape& shape) {
  return shape.warps > 0;
}

/// Finds the ring of a forward pass on the device at hand.
Status find_forward_ring(const Problem& problem, const TileShapes& tiles, Places places, const Device& device,
                         RingShape& result);

/// Those of a backward pass, by the kernel that they are for.
struct GradientRings {
  RingShape of_queries, of_keys;
};

/// Finds these.
///
/// Args:
///   region_of_keys: with which the kernel of key and value gradients would go otherwise.
Status find_gradient_rings(const Problem& problem, const TileShapes& tiles, Places places, const Device& device,
                           const Region& region_of_keys, GradientRings& result);

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
