// Launch functions of the portable CUDA kernels. The FFI handlers call only these functions of csrc/cuda/sm80.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "natten_jax/arrays.h"
#include "natten_jax/problem.h"
#include "natten_jax/status.h"

namespace natten_jax::sm80 {

/// Checks that the kernels support a problem: its windows, key biases, head dimensions and number of tokens.
Status check_arrays(const Problem& problem);

/// Launches the forward pass of a problem that passed `check_arrays`. Products of float32 elements are computed in TF32
/// unless `is_accurate`.
Status run_forward(const Problem& problem, const TileShapes& tiles, const Arrays& arrays, bool is_accurate,
                   cudaStream_t stream);

/// Heads whose query gradients are accumulated at a time: all heads of one or more batch entries, or some heads of one
/// entry.
struct HeadBlock {
  std::int64_t batch;     ///< Number of batch entries.
  std::int64_t heads_kv;  ///< Number of key/value heads per entry. The block has all query heads that share them.
};

/// The block of heads whose query gradients take `scratch_elements` float32 elements; zeros if there is no such block.
HeadBlock head_block(const Problem& problem, std::int64_t scratch_elements);

/// Launches the backward pass of a problem that passed `check_arrays`. Products of float32 elements are computed in
/// TF32 unless `is_accurate`.
///
/// Blocks of heads are processed one after the other. If elements have 16 bits, `query_gradient_sums` is float32
/// scratch for the query gradients of a block: [batch, heads, x, y, z, head_dim].
///
/// At most `kv_splits` CTAs share the key/value tiles of a head and dilation group; 0 means a CTA per tile. Gradients
/// are reproducible if `kv_splits` is 1.
Status run_backward(const Problem& problem, const TileShapes& tiles, const Arrays& arrays, float* query_gradient_sums,
                    const HeadBlock& block, std::int64_t kv_splits, bool is_accurate, cudaStream_t stream);

}  // namespace natten_jax::sm80
