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

/// Stores the gradients of pairs' logits, rounded as they are multiplied; what is hidden has no place.
template <int kPairs>
CUTE_DEVICE void store_logit_gradients(const TilePlan& tile, std::uint32_t sums, const std::uint32_t (&a)[kPairs][4],
                                       const Pairs<kPairs>& pairs) {
  CUTE_UNROLL
  for (int i = 0; i < 8 * kPairs; ++i) {
    const int pair = i / 8, h = i / 4 % 2, e = i % 4, r = e / 2, c = e % 2;
    const std::uint32_t at =
        sums + tile.sums[r] + ((pairs.at[pair].entry + h * tile.next_entry_of_group + c * tile.next_entry) >> 1);
    // The bit is on top of the element's byte of the group's masks.
    const bool is_seen = (pairs.masks[pair] & 0x8u << (8 * e + 4 * h)) == 0;
    const auto half = static_cast<std::uint16_t>(c == 0 ? a[pair][2 * h + r] : a[pair][2 * h + r] >> 16);
    if (is_seen) asm volatile("st.shared.u16 [%0], %1;" : : "r"(at), "h"(half) : "memory");
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
  __syncwarp();
  // Of the columns of eight matrices, row i of a result has those of the matrix i.
  constexpr int kMatrices = 8, kAtOnce = kMatrices * kColumns;
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
        const std::uint32_t a = lane / 4 == i + j ? ones : 0;
        Instruction::fma(sum[0], sum[1], sum[2], sum[3], a, 0, a, 0, r[2 * j], r[2 * j + 1], sum[0], sum[1], sum[2],
                         sum[3]);
      }
    }
    const int own = first + 2 * lane;
    if (own < region.record) *reinterpret_cast<float2*>(to + own) = make_float2(sum[0], sum[1]);
  }
  if (lane == 0) *reinterpret_cast<int*>(to + region.record) = tile.first_entry;
  __syncwarp();
}

}  // namespace natten_jax::small
