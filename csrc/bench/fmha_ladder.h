// Attention kernels with fewer optimisations than the production kernels. Benchmarks compare their times to measure the
// gain of each optimisation.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "natten_jax/problem.h"

namespace natten_jax::bench {

/// Kernels in the order of the benchmark's ladder. Each kernel (rung) also has the optimisations of the rungs before
/// it.
enum class Rung {
  kBasic = 1,  ///< Tensor cores and natural exponentials. Loads do not overlap with products, and transpose keys.
  kMath = 2,   ///< Exponentials in base 2 that include the scale, and approximate division.
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
