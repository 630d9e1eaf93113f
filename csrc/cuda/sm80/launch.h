// Launches the portable CUDA kernels; the interface between the FFI handlers and csrc/cuda/sm80.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "natten_jax/arrays.h"
#include "natten_jax/problem.h"
#include "natten_jax/status.h"

namespace natten_jax::sm80 {

/// Checks what the arrays of a problem are.
Status check_arrays(const Problem& problem);

/// Runs the forward pass of a checked problem on a stream. Products of float32 arrays are computed in TF32 unless
/// `is_accurate`.
Status run_forward(const Problem& problem, const TileShapes& tiles, const Arrays& arrays, bool is_accurate,
                   cudaStream_t stream);

/// The heads whose query gradients are summed up at a time: all of some batch entries, or some of one entry.
struct HeadBlock {
  std::int64_t batch;
  std::int64_t heads_kv;  ///< With all query heads that share them.
};

/// The heads that a scratch array of so many float32 elements has room for; none where it is no whole number of heads.
HeadBlock head_block(const Problem& problem, std::int64_t scratch_elements);

/// Runs the backward pass likewise. The key/value tiles of a head and dilation group are shared by up to `kv_splits`
/// CTAs; 0 is one for each tile. Gradients are reproducible where it is 1. Blocks of heads run one after the other;
/// `query_gradient_sums` is scratch of 16-bit problems: [batch, heads, x, y, z, head_dim] of a block.
Status run_backward(const Problem& problem, const TileShapes& tiles, const Arrays& arrays, float* query_gradient_sums,
                    const HeadBlock& block, std::int64_t kv_splits, bool is_accurate, cudaStream_t stream);

}  // namespace natten_jax::sm80
