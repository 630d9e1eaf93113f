// Launches the Hopper backward kernels; the interface between the FFI handlers and csrc/cuda/sm90.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "natten_jax/arrays.h"
#include "natten_jax/problem.h"
#include "natten_jax/status.h"

namespace natten_jax::sm90 {

/// Fails where the kernels do not take the problem.
Status check_backward(const Problem& problem, const TileShapes& tiles);

/// Scratch memory: sums of the query gradient [batch, heads, x, y, z, head_dim]; a counter of key/value tiles; for
/// deterministic gradients, a counter per query tile [batch, heads, dilation groups, query tiles] of those that have
/// added to its gradient.
std::int64_t backward_scratch_elements(const Problem& problem, const TileShapes& tiles, bool is_deterministic);

/// Runs the backward pass of a problem that `check_backward` takes on a stream. Gradients that are not deterministic
/// are faster; those of queries then differ in rounding from run to run. `statistics` are [batch, heads, x, y, z, 2]:
/// logsumexp in base 2, delta; `scratch` has as many elements as `backward_scratch_elements` says.
Status run_backward(const Problem& problem, const TileShapes& tiles, const Arrays& arrays, const float* statistics,
                    float* scratch, bool is_deterministic, cudaStream_t stream);

}  // namespace natten_jax::sm90
