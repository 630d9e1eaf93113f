// Memory-bound kernels that are launched before or after a backward kernel.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "natten_jax/problem.h"

namespace natten_jax {

/// Computes the statistics of queries that a backward kernel needs: float32 [batch, heads, tokens, 2]. The two values
/// are the logsumexp in base 2, and delta = sum(out * out_cotangent) - logsumexp_cotangent.
///
/// Args:
///   type: element type of `out` and `out_cotangent`, [batch, tokens, heads, head_dim]. It must have 16 bits.
///   logsumexp: [batch, tokens, heads].
///   logsumexp_cotangent: [batch, tokens, heads], or null: zeros.
///   head_dim: a multiple of 8, at most 256.
///   is_padded: if true, queries with a logsumexp of -infinity may be padding: their `out` and `out_cotangent` are not
///     read.
cudaError_t launch_statistics(ElementType type, const void* out, const void* out_cotangent, const float* logsumexp,
                              const float* logsumexp_cotangent, float* statistics, std::int64_t batch,
                              std::int64_t tokens, std::int64_t heads, std::int64_t head_dim, bool is_padded,
                              cudaStream_t stream);

/// Computes only delta, as one float32 value per row.
///
/// Args:
///   type: element type of `out` and `out_cotangent`, [rows, head_dim].
///   logsumexp_cotangent: one value per row, or null: zeros.
///   head_dim: a multiple of 8, at most 256.
cudaError_t launch_delta(ElementType type, const void* out, const void* out_cotangent, const float* logsumexp_cotangent,
                         float* delta, std::int64_t rows, std::int64_t head_dim, cudaStream_t stream);

/// Scales sums, [batch, heads, tokens, head_dim], and rounds them to elements. Writes these to `heads` consecutive
/// heads of an array [batch, tokens, all_heads, head_dim].
///
/// Args:
///   type: element type of `gradient`. It must have 16 bits.
///   row_statistics: with padding, the results of `launch_statistics`, in the order of the sums; otherwise null. If the
///     logsumexp of a row is -infinity, its sums are undefined, and its gradient is zero.
///   gradient: address of the first head that is written.
///   head_dim: a multiple of 8.
///   overlaps: true if the kernel may start before the previous kernel has ended. Requires compute capability 9.0.
cudaError_t launch_convert_gradient(ElementType type, const float* sums, const float* row_statistics,
                                    const Scale& scale, void* gradient, std::int64_t batch, std::int64_t tokens,
                                    std::int64_t heads, std::int64_t all_heads, std::int64_t head_dim, bool overlaps,
                                    cudaStream_t stream);

/// Fills elements with zeros. The kernel may overlap with the previous and the next kernel, which requires compute
/// capability 9.0.
///
/// Args:
///   row_statistics: as in `launch_convert_gradient`, for the first `rows` rows. Rows with a logsumexp of -infinity
///     stay unchanged.
///   row_elements: number of elements per row; a multiple of 8.
cudaError_t launch_clear(float* elements, std::int64_t number, cudaStream_t stream,
                         const float* row_statistics = nullptr, std::int64_t rows = 0, std::int64_t row_elements = 8);

}  // namespace natten_jax
