// Launches the Hopper backward kernels; the interface between the FFI handlers and csrc/cuda/sm90.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "natten_jax/problem.h"
#include "natten_jax/status.h"

namespace natten_jax::sm90 {

/// Device pointers of one backward call.
struct BackwardArrays {
  const void* query;
  const void* key;
  const void* value;
  const void* additional_keys;
  const void* additional_values;
  const std::int32_t* origins;
  const void* out_cotangent;
  const float* statistics;  ///< [batch, heads, x, y, z, 2]: logsumexp in base 2, delta.
  const float* remainder;   ///< The logsumexp's (natten_jax/logsumexp.h), [batch, x, y, z, heads]; null: zeros.
  void* query_gradient;
  void* key_gradient;
  void* value_gradient;
  void* additional_keys_gradient;
  void* additional_values_gradient;
  float* scratch;  ///< As many elements as `backward_scratch_elements` says.
};

/// Fails where the kernels do not take the problem.
Status check_backward(const Problem& problem, const TileShapes& tiles);

/// Scratch memory: sums of the query gradient [batch, heads, x, y, z, head_dim]; a counter of key/value tiles; for
/// deterministic gradients, a counter per query tile [batch, heads, dilation groups, query tiles] of those that have
/// added to its gradient.
std::int64_t backward_scratch_elements(const Problem& problem, const TileShapes& tiles, bool is_deterministic);

/// Runs the backward pass of a problem that `check_backward` takes on a stream. Gradients that are not deterministic
/// are faster; those of queries then differ in rounding from run to run.
Status run_backward(const Problem& problem, const TileShapes& tiles, const BackwardArrays& arrays,
                    bool is_deterministic, cudaStream_t stream);

}  // namespace natten_jax::sm90
