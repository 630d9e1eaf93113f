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

/// Runs the forward pass on a stream; returns an empty string, or a sentence that says what is not supported or
/// failed. Products of float32 arrays are computed in TF32 unless `is_accurate`.
std::string run_forward(const Problem& problem, const TileShapes& tiles, const Arrays& arrays, bool is_accurate,
                        cudaStream_t stream);

}  // namespace natten_jax::sm80
