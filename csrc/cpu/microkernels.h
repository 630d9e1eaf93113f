// The two matrix products of all passes. Lanes hold tokens of the owner side. Rows are tokens of the stream side. Each
// element of a row is read as a scalar and broadcast to the lanes, so the stream side is never transposed.
//
// This is kernel code: it is compiled once per instruction set, each time in a separate namespace.
#pragma once

#include <cstdint>

#include "cpu/vector.h"

namespace natten_jax::cpu::NATTEN_JAX_ISA {
namespace {

/// Computes out[r][lane] = factor[lane] * (sum over d of rows[r][d] * lanes[d][lane]) for kDotRows rows. The result for
/// a query and a key does not depend on which of them is the row, so all passes compute bitwise equal logits.
NATTEN_JAX_INLINE void dot_group(const float* lanes, const float* const* rows, std::int64_t depth, const Float& factor,
                                 float* out) {
  const float* row[kDotRows];
  NativeFloat sum[kDotRows][kVectors] = {};
  NATTEN_JAX_UNROLL
  for (int r = 0; r < kDotRows; ++r) row[r] = rows[r];
  for (std::int64_t d = 0; d < depth; ++d) {
    const Float lane = load(lanes + d * kLanes);
    NATTEN_JAX_UNROLL
    for (int r = 0; r < kDotRows; ++r) {
      const float scalar = row[r][d];
      NATTEN_JAX_UNROLL
      for (int i = 0; i < kVectors; ++i) sum[r][i] += lane.v[i] * scalar;
    }
  }
  NATTEN_JAX_UNROLL
  for (int r = 0; r < kDotRows; ++r) {
    NATTEN_JAX_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      *reinterpret_cast<NativeFloat*>(out + r * kLanes + i * kWidth) = sum[r][i] * factor.v[i];
    }
  }
}

/// Calls dot_group for all `count` rows. `rows` and `out` must have space for kRowPadding more rows. This space is
/// overwritten.
NATTEN_JAX_INLINE void dot(const float* lanes, const float** rows, std::int64_t count, std::int64_t depth,
                           const Float& factor, float* out) {
  for (int r = 0; r < kDotRows; ++r) rows[count + r] = rows[count - 1];
  for (std::int64_t r = 0; r < count; r += kDotRows) dot_group(lanes, rows + r, depth, factor, out + r * kLanes);
}

/// Computes sums[c][lane] = keep[lane] * sums[c][lane] + (sum over r of weights[r][lane] * rows[r][c]) for `Columns`
/// columns c, from `column` on. Without `Rescale`, `keep` is not used: the factor is one.
template <int Columns, bool Rescale>
NATTEN_JAX_INLINE void accumulate_columns(const float* weights, const float* const* rows, std::int64_t count,
                                          std::int64_t column, const Float& keep, float* sums) {
  NativeFloat sum[Columns][kVectors] = {};
  for (std::int64_t r = 0; r < count; ++r) {
    const Float weight = load(weights + r * kLanes);
    const float* row = rows[r] + column;
    NATTEN_JAX_UNROLL
    for (int c = 0; c < Columns; ++c) {
      const float scalar = row[c];
      NATTEN_JAX_UNROLL
      for (int i = 0; i < kVectors; ++i) sum[c][i] += weight.v[i] * scalar;
    }
  }
  // Add the sum of the tile's rows to the running sum. With these two levels, rounding errors stay small for long
  // sequences.
  NATTEN_JAX_UNROLL
  for (int c = 0; c < Columns; ++c) {
    NATTEN_JAX_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      auto* target = reinterpret_cast<NativeFloat*>(sums + (column + c) * kLanes + i * kWidth);
      *target = (Rescale ? *target * keep.v[i] : *target) + sum[c][i];
    }
  }
}

/// Calls accumulate_columns for columns 0 to `columns` - 1, in groups.
template <bool Rescale>
NATTEN_JAX_INLINE void accumulate(const float* weights, const float* const* rows, std::int64_t count,
                                  std::int64_t columns, const Float& keep, float* sums) {
  std::int64_t c = 0;
  for (; c + kSumColumns <= columns; c += kSumColumns) {
    accumulate_columns<kSumColumns, Rescale>(weights, rows, count, c, keep, sums);
  }
  for (; c + 4 <= columns; c += 4) accumulate_columns<4, Rescale>(weights, rows, count, c, keep, sums);
  for (; c < columns; ++c) accumulate_columns<1, Rescale>(weights, rows, count, c, keep, sums);
}

}  // namespace
}  // namespace natten_jax::cpu::NATTEN_JAX_ISA
