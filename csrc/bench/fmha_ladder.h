// Attention with fewer optimisations than the production kernels, to measure the gain of each optimisation.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "natten_jax/problem.h"

namespace natten_jax::bench {

/// Rungs of the ladder. Each includes the optimisations of the rungs before it.
enum class Rung {
  kBasic = 1,  ///< Tensor cores; natural exponentials; keys are transposed when they are stored; no overlap.
  kMath = 2,   ///< Exponentials in base 2 with the scale folded in; approximate division.
  kMemory = 3  ///< Asynchronous copies one tile ahead; keys are transposed when tensor cores read them.
};

/// Queries and keys of a tile. The best size for a GPU depends on its registers and shared memory.
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

/// Launches a rung; head_dim must be 64 or 128.
template <ElementType kType>
cudaError_t launch_fmha(Rung rung, TileSizes tiles, int head_dim, const FmhaParams& params, cudaStream_t stream);

}  // namespace natten_jax::bench
