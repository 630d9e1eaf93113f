// Sums of the gradients of logits, offset by offset, for the gradient of a relative bias. A warp keeps the 16-bit
// gradients of a tile's logits in a row for each of its queries, where those of the same offset are in one column, and
// the matrix units add up the columns: no two lanes ever add to one number.
#pragma once

#include "cuda/small/products.cuh"

namespace natten_jax::small {

/// Fills the rows of a warp with zeros: what lies outside of a query's window stays zero for all items.
CUTE_DEVICE void clear_sums(const CommonParams& p, char* raw) {
  const int bytes = bytes_of_sums(p.region.record), lane = threadIdx.x % 32;
  char* own = raw + p.region.shared.sums + threadIdx.x / 32 * bytes;
#pragma unroll 4
  for (int at = lane * 16; at < bytes; at += 32 * 16) *reinterpret_cast<uint4*>(own + at) = make_uint4(0, 0, 0, 0);
  __syncwarp();
}

/// Stores the gradients of pairs' logits, rounded as they are multiplied, two neighbors in a word. What is hidden
/// beside something that is seen is zero, in a place that is nobody's.
template <int kPairs>
CUTE_DEVICE void store_logit_gradients(const TilePlan& tile, std::uint32_t sums, const std::uint32_t (&a)[kPairs][4],
                                       const Pairs<kPairs>& pairs) {
  CUTE_UNROLL
  for (int i = 0; i < 4 * kPairs; ++i) {
    const int pair = i / 4, h = i / 2 % 2, r = i % 2;
    // On top of the elements' bytes of the group's masks.
    const std::uint32_t both = 0x808u << (16 * r + 4 * h);
    if ((pairs.masks[pair] & both) == both) continue;
    store_word(sums + tile.sums[r] + pairs.at[pair].sum() + h * tile.next_sum_of_group, a[pair][2 * h + r]);
  }
}

/// Adds up a tile's rows, and writes the sums to its record.
template <class Element>
CUTE_DEVICE void write_record(const BackwardParams& p, const TilePlan& tile, std::uint32_t sums, const Item& item) {
  using Instruction = HalfInstruction<Element>;
  const Region& region = p.region;
  const int lane = threadIdx.x % 32, row_bytes = bytes_of_sums_row(region.record);
  const std::uint32_t ones = pack<Element>(1.f, 1.f);
  const std::uint32_t rows = sums + region.shared.sums + threadIdx.x / 32 * bytes_of_sums(region.record) +
                             lane % 16 * row_bytes + lane / 16 * 16;
  const std::int64_t record = std::int64_t{item.number(p)} * p.table_tiles + tile.number;
  float* const to = p.table_records + record * (region.record + kRecordHeader);
  float last = 0.f;
  __syncwarp();
  // Of the columns of eight matrices, row i of a result has those of matrix i: sums of the rows that begin with a word,
  // and eight rows below, those of the others, whose columns are one number further.
  constexpr int kMatrices = 8, kAtOnce = kMatrices * kColumns;
  CUTE_NO_UNROLL
  for (int first = 0; first < region.record; first += kAtOnce) {
    float sum[4] = {};
    CUTE_UNROLL
    for (int i = 0; i < kMatrices; i += 2) {
      const int column = first + i * kColumns;
      if (column >= region.record) break;
      std::uint32_t r[4];
      load_matrices_transposed(r, rows + 2 * column);
      CUTE_UNROLL
      for (int j = 0; j < 2; ++j) {
        const std::uint32_t all = lane / 4 == i + j ? ones : 0;
        std::uint32_t a[4];
        CUTE_UNROLL
        for (int k = 0; k < 2; ++k) {
          a[2 * k] = all & ~tile.late_rows[k];
          a[2 * k + 1] = all & tile.late_rows[k];
        }
        Instruction::fma(sum[0], sum[1], sum[2], sum[3], a[0], a[1], a[2], a[3], r[2 * j], r[2 * j + 1], sum[0], sum[1],
                         sum[2], sum[3]);
      }
    }
    const float next = __shfl_down_sync(0xffffffffu, sum[2], 1), of_last = __shfl_sync(0xffffffffu, sum[2], 0);
    // The last number lacks what only now is known.
    if (lane == 31 && first > 0) to[first - 1] = last + of_last;
    last = sum[1];
    const int own = first + 2 * lane;
    if (own < region.record) *reinterpret_cast<float2*>(to + own) = make_float2(sum[0] + sum[3], sum[1] + next);
  }
  if (lane == 0) {
    CUTE_UNROLL
    for (int d = 0; d < kRank; ++d) {
      reinterpret_cast<int*>(to + region.record)[region.dimension[d]] = tile.least_offset[d];
    }
  }
  __syncwarp();
}

}  // namespace natten_jax::small
