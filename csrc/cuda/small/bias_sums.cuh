// Sums of logit gradients by offset, for the gradient of a relative bias. A warp stores the logit gradients of a tile
// in shared memory, in 16 bits, with a row per query and a column per offset. MMA instructions then add up each column,
// so no two lanes add to the same number.
#pragma once

#include "cuda/small/products.cuh"

namespace natten_jax::small {

/// Returns the address of the warp's rows of logit gradients in shared memory.
CUTE_DEVICE char* sums_of_warp(const CommonParams& p, char* raw) {
  return raw + p.region.shared.sums + threadIdx.x / 32 * bytes_of_sums(p.region.record);
}

/// Zeroes `bytes` bytes of the warp's memory, starting at `memory`.
CUTE_DEVICE void clear_warp_memory(char* memory, int bytes) {
  __syncwarp();
#pragma unroll 4
  for (int at = threadIdx.x % 32 * 16; at < bytes; at += 32 * 16) {
    *reinterpret_cast<uint4*>(memory + at) = make_uint4(0, 0, 0, 0);
  }
  __syncwarp();
}

/// Zeroes the warp's rows of logit gradients. Elements outside of a query's window stay zero for all items.
CUTE_DEVICE void clear_sums(const CommonParams& p, char* raw) {
  clear_warp_memory(sums_of_warp(p, raw), bytes_of_sums(p.region.record));
}

/// Stores the logit gradients of pairs of groups, rounded to the element type. A word contains two neighboring
/// elements, and is stored if at least one of them is visible. A hidden (masked-out) element of the word is
/// stored as zero, at a position where no visible element of the row is stored.
template <int kPairs>
CUTE_DEVICE void store_logit_gradients(const TilePlan& tile, std::uint32_t sums, const std::uint32_t (&a)[kPairs][4],
                                       const Pairs<kPairs>& pairs) {
  CUTE_UNROLL
  for (int pair = 0; pair < kPairs; ++pair) {
    // `keep_in_register` makes values opaque to the compiler. Otherwise, the compiler would recompute the addresses for
    // each store, and would need two instructions to test the bits of a word.
    const std::uint32_t visible = keep_in_register(~pairs.masks[pair]);
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int h = i / 2, r = i % 2;
      const std::uint32_t at =
          keep_in_register(sums + tile.sums[r] + pairs.at[pair].sum() + h * tile.next_sum_of_group);
      // Tests the mask bits of the word's two elements. In the mask, each element has a byte, with bit 3 for the first
      // group of the pair and bit 7 for the second group.
      if ((visible & 0x808u << (16 * r + 4 * h)) != 0) store_word(at, a[pair][2 * h + r]);
    }
  }
}

/// Computes the B operand of the product that adds up a tile's rows of logit gradients. The product has a row for each
/// column of the logit gradients. Its first column contains the sums over the rows that are not late. Its second column
/// contains the sums over the late rows, which are stored one number later (TilePlan::late_rows).
template <class Element>
CUTE_DEVICE void columns_of_rows(std::uint32_t (&b)[2], const TilePlan& tile) {
  const int number = threadIdx.x % 32 / 4;
  CUTE_UNROLL
  for (int k = 0; k < 2; ++k) {
    const std::uint32_t row_mask = number == 0 ? ~tile.late_rows[k] : number == 1 ? tile.late_rows[k] : 0;
    b[k] = pack<Element>(1.f, 1.f) & row_mask;
  }
}

/// Adds up a tile's rows of logit gradients, and writes the sums to `to` in the layout of a record (RecordLayout).
template <class Element>
CUTE_DEVICE void add_up_rows(const CommonParams& p, const TilePlan& tile, std::uint32_t sums, float* to) {
  using Instruction = HalfInstruction<Element>;
  const Region& region = p.region;
  const int lane = threadIdx.x % 32, row_bytes = bytes_of_sums_row(region.record), number = lane / 4;
  const std::uint32_t rows = sums + region.shared.sums + threadIdx.x / 32 * bytes_of_sums(region.record) +
                             lane % 16 * row_bytes + lane / 16 * 16;
  std::uint32_t b[2];
  columns_of_rows<Element>(b, tile);
  // Sum over the late rows for the last number of this iteration. The previous iteration has computed it together with
  // the next number, because late rows are stored one number later.
  float behind = 0.f;
  __syncwarp();
  CUTE_NO_UNROLL
  for (int first = region.record - kRecordStep; first >= 0; first -= kRecordStep) {
    std::uint32_t r[4];
    load_matrices_transposed(r, rows + kBytesOfSum * first);
    float d[4];
    Instruction::fma(d[0], d[1], d[2], d[3], r[0], r[2], r[1], r[3], b[0], b[1], 0.f, 0.f, 0.f, 0.f);
    const float eighth_sum = __shfl_sync(0xffffffffu, d[3], 0);
    float low = __shfl_down_sync(0xffffffffu, d[1], 4), high = __shfl_down_sync(0xffffffffu, d[3], 4);
    if (number == kColumns - 1) {
      low = eighth_sum;
      high = behind;
    }
    behind = __shfl_sync(0xffffffffu, d[1], 0);
    if (lane % 4 == 0) {
      to[first + number] = d[0] + low;
      to[first + kColumns + number] = d[2] + high;
    }
  }
  __syncwarp();
}

/// Adds up a tile's rows of logit gradients, and writes the sums and the tile's smallest offsets to its record.
template <class Element>
CUTE_DEVICE void write_record(const BackwardParams& p, const TilePlan& tile, std::uint32_t sums, const Item& item) {
  const Region& region = p.region;
  const std::int64_t record = std::int64_t{item.number(p)} * p.table_tiles + tile.number;
  float* const to = p.table_records + record * (region.record + kRecordHeader);
  add_up_rows<Element>(p, tile, sums, to);
  if (threadIdx.x % 32 == 0) {
    CUTE_UNROLL
    for (int d = 0; d < kRank; ++d) {
      reinterpret_cast<int*>(to + region.record)[region.dimension[d]] = tile.least_offset[d];
    }
  }
}

}  // namespace natten_jax::small
