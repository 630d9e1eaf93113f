// Attention with fewer optimisations than the production kernels have, to measure what each optimisation pays.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "natten_jax/problem.h"

namespace natten_jax::bench {

/// Rungs of the ladder; each has what the ones before it have.
enum class Rung {
  kBasic = 1,  ///< Matrix units; natural exponentials, keys transposed as they are stored, nothing overlaps.
  kMath = 2,   ///< Exponentials in base 2 with the scale folded in; approximate division.
  kMemory = 3  ///< Asynchronous copies one tile ahead; keys are transposed as the matrix units read them.
};

/// Queries and keys of a tile; which suits a GPU depends on its registers and shared memory.
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
