// The memory-bound kernels around a backward kernel.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "natten_jax/problem.h"

namespace natten_jax {

/// What a backward kernel needs to know of every query: float32 [batch, heads, tokens, 2], the logsumexp in base 2 and
/// delta = sum(out * out_cotangent) - logsumexp_cotangent.
///
/// Args:
///   type: element type of `out` and `out_cotangent`, [batch, tokens, heads, head_dim]: of 16 bits.
///   logsumexp, logsumexp_cotangent: [batch, tokens, heads]; the second may be null: zeros.
///   head_dim: a multiple of 8, at most 256.
///   is_padded: whether rows whose logsumexp is that of no key may be padding, of which nothing else is read.
cudaError_t launch_statistics(ElementType type, const void* out, const void* out_cotangent, const float* logsumexp,
                              const float* logsumexp_cotangent, float* statistics, std::int64_t batch,
                              std::int64_t tokens, std::int64_t heads, std::int64_t head_dim, bool is_padded,
                              cudaStream_t stream);

/// delta alone: float32, one value per row.
///
/// Args:
///   type: element type of `out` and `out_cotangent`, [rows, head_dim].
///   logsumexp_cotangent: one value per row, or null: zeros.
///   head_dim: a multiple of 8, at most 256.
cudaError_t launch_delta(ElementType type, const void* out, const void* out_cotangent, const float* logsumexp_cotangent,
                         float* delta, std::int64_t rows, std::int64_t head_dim, cudaStream_t stream);

/// Scales sums [batch, heads, tokens, head_dim] and rounds them to some heads of an array
/// [batch, tokens, all_heads, head_dim].
///
/// Args:
///   type: element type of `gradient`: of 16 bits.
///   of_rows: where there is padding, numbers as `launch_statistics` finds them, in the order of the sums; else null.
///   Rows
///     whose logsumexp is that of no key have no sums.
///   gradient: the first of those heads.
///   head_dim: a multiple of 8.
///   overlaps: whether it may start before the kernel before it is done: compute capability 9.0.
cudaError_t launch_convert_gradient(ElementType type, const float* sums, const float* of_rows, const Scale& scale,
                                    void* gradient, std::int64_t batch, std::int64_t tokens, std::int64_t heads,
                                    std::int64_t all_heads, std::int64_t head_dim, bool overlaps, cudaStream_t stream);

/// Fills elements with zeros. Overlaps with the kernel before and lets the next one overlap: compute capability 9.0.
///
/// Args:
///   of_rows: where there is padding, as in `launch_convert_gradient`; rows without sums, of the first `rows`, stay as
///     they are.
///   row_elements: of a row; a multiple of 8.
cudaError_t launch_clear(float* elements, std::int64_t number, cudaStream_t stream, const float* of_rows = nullptr,
                         std::int64_t rows = 0, std::int64_t row_elements = 8);

}  // namespace natten_jax
