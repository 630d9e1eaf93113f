// The memory-bound kernels around a backward kernel.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace natten_jax {

/// delta[row] = sum(out[row] * out_cotangent[row]) - logsumexp_cotangent[row], in float32.
///
/// Args:
///   is_bfloat16: element type of `out` and `out_cotangent`; float16 otherwise.
///   rows: queries and heads.
///   head_dim: elements of a row, a multiple of 8.
cudaError_t launch_delta(bool is_bfloat16, const void* out, const void* out_cotangent, const float* logsumexp_cotangent,
                         float* delta, std::int64_t rows, std::int64_t head_dim, cudaStream_t stream);

/// Scales sums [batch, heads, tokens, head_dim] and rounds them to an array [batch, tokens, heads, head_dim].
///
/// Args:
///   is_bfloat16: element type of `gradient`; float16 otherwise.
///   head_dim: a multiple of 8.
cudaError_t launch_convert_gradient(bool is_bfloat16, const float* sums, float scale, void* gradient,
                                    std::int64_t batch, std::int64_t tokens, std::int64_t heads, std::int64_t head_dim,
                                    cudaStream_t stream);

}  // namespace natten_jax
