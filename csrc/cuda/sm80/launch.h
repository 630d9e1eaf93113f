// Launches the portable CUDA kernels; the interface between the FFI handlers and csrc/cuda/sm80.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "natten_jax/problem.h"

namespace natten_jax::sm80 {

/// Device pointers of one call.
struct Arrays {
  const void* query;
  const void* key;
  const void* value;
  const void* additional_keys;
  const void* additional_values;
  const std::int32_t* origins;
  void* out;
  float* logsumexp;
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
  const void* out_cotangent;
  const float* delta;
  void* query_gradient;
  void* key_gradient;
  void* value_gradient;
  void* additional_keys_gradient;
  void* additional_values_gradient;
  float* query_gradient_sums;  ///< Scratch of 16-bit problems: [batch, heads, x, y, z, head_dim].
};

/// Runs the forward pass on a stream; returns an empty string, or a sentence that says what is not supported or
/// failed. Products of float32 arrays are computed in TF32 unless `is_accurate`.
std::string run_forward(const Problem& problem, const TileShapes& tiles, const Arrays& arrays, bool is_accurate,
                        cudaStream_t stream);

/// Runs the backward pass likewise. The key/value tiles of a head and dilation group are shared by up to `kv_splits`
/// CTAs; 0 is one for each tile. Gradients are reproducible where
/// it is 1.
std::string run_backward(const Problem& problem, const TileShapes& tiles, const BackwardArrays& arrays,
                         std::int64_t kv_splits, bool is_accurate, cudaStream_t stream);

}  // namespace natten_jax::sm80
