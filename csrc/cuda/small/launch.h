// Launches the kernels for small windows; the interface between the FFI handlers and csrc/cuda/small.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "natten_jax/problem.h"
#include "natten_jax/status.h"

namespace natten_jax::small {

/// Device pointers of one call.
struct ForwardArrays {
  const void* query;
  const void* key;
  const void* value;
  const void* additional_keys;
  const void* additional_values;
  const std::int32_t* origins;
  void* out;
  float* logsumexp;
  float* remainder;  ///< The logsumexp's (natten_jax/logsumexp.h); null where nobody wants it.
};

/// Device pointers of one backward call.
struct BackwardArrays {
  const void* query;
  const void* key;
  const void* value;
  const void* additional_keys;
  const void* additional_values;
  const std::int32_t* origins;
  const float* logsumexp;
  const float* remainder;  ///< Null: zeros.
  const void* out;
  const void* out_cotangent;
  const float* logsumexp_cotangent;
  void* query_gradient;
  void* key_gradient;
  void* value_gradient;
  void* additional_keys_gradient;
  void* additional_values_gradient;
  float* statistics;       ///< Scratch: [batch, tokens, heads, 4].
  float* additional_sums;  ///< Scratch: [additional_parts(), batch, additional_kv, heads_kv, head_dim + head_dim_v].
};

/// Whether the form takes elements and heads such as a problem's, or an error.
Status check_arrays(const Problem& problem);

/// Runs the forward pass of a checked problem on a stream. Query tiles have 16 tokens, key/value tiles 8.
Status run_forward(const Problem& problem, const TileShapes& tiles, const ForwardArrays& arrays, cudaStream_t stream);

/// Runs the backward pass likewise. Key/value tiles have 16 tokens, query tiles 8. Results are reproducible.
Status run_backward(const Problem& problem, const TileShapes& tiles, const BackwardArrays& arrays, cudaStream_t stream);

}  // namespace natten_jax::small
