// Launches the portable CUDA kernels; the interface between the FFI handlers and csrc/cuda/sm80.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "natten_jax/arrays.h"
#include "natten_jax/problem.h"
#include "natten_jax/status.h"

namespace natten_jax::sm80 {

/// Checks the properties of a problem's arrays.
Status check_arrays(const Problem& problem);

/// Launches the forward pass of a checked problem on a stream. Products of float32 arrays are computed in TF32 unless
/// `is_accurate`.
Status run_forward(const Problem& problem, const TileShapes& tiles, const Arrays& arrays, bool is_accurate,
                   cudaStream_t stream);

/// Heads whose query gradients are accumulated at a time: all heads of some batch entries, or some heads of one entry.
struct HeadBlock {
  std::int64_t batch;
  std::int64_t heads_kv;  ///< Each with all query heads that share it.
};

/// Heads that fit into scratch of this number of float32 elements; zeros if this is not a whole number of heads.
HeadBlock head_block(const Problem& problem, std::int64_t scratch_elements);

/// Launches the backward pass of a checked problem on a stream. Up to `kv_splits` CTAs share the key/value tiles of a
/// head and dilation group; 0 means a CTA per tile. Gradients are reproducible if `kv_splits` is 1. Blocks of heads
/// run one after the other; `query_gradient_sums` is scratch for 16-bit problems: [batch, heads, x, y, z, head_dim] of
/// a block.
Status run_backward(const Problem& problem, const TileShapes& tiles, const Arrays& arrays, float* query_gradient_sums,
                    const HeadBlock& block, std::int64_t kv_splits, bool is_accurate, cudaStream_t stream);

}  // namespace natten_jax::sm80
