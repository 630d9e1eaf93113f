// Attention kernels with fewer optimizations than the production kernels. Benchmarks compare the times of these kernels
// to measure the gain of each optimization.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "natten_jax/problem.h"

namespace natten_jax::bench {

/// Benchmark kernels (rungs), fewest optimizations first. Each rung also has the optimizations of the rungs before it.
enum class Rung {
  kBasic = 1,  ///< Tensor cores, natural exponentials. Loads do not overlap with products. Keys are transposed.
  kMath = 2,   ///< Exponentials in base 2, with the scale in their argument. Approximate division.
  kMemory = 3  ///< Asynchronous copies, one tile ahead. Keys are not transposed in shared memory.
};

/// Numbers of queries and keys per tile. The fastest size depends on the registers and shared memory of a GPU.
enum class TileSizes { k64x64 = 0, k128x64 = 1, k128x128 = 2 };

/// Self attention of [batch, tokens, heads, head_dim] arrays.
struct FmhaParams {
  const void* query;
  const void* key;
  const void* value;
  void* out;
  int batch;
  int tokens;
  int heads;
  float scale;
  bool is_causal;
};

/// Launches the kernel of a rung. `head_dim` must be 64 or 128.
template <ElementType kType>
cudaError_t launch_fmha(Rung rung, TileSizes tiles, int head_dim, const FmhaParams& params, cudaStream_t stream);

}  // namespace natten_jax::bench
