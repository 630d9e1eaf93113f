// Sums of logit gradients by offset, for the gradient of a relative bias in the kernel of whole layouts. A CTA sums
// over all tiles of its region and over all of its batch entries. It writes only a single table to global memory.
#pragma once

#include "cuda/small/bias_sums.cuh"
#include "cuda/small/head_items.cuh"

namespace natten_jax::small {

/// Sums of logit gradients over the queries of each warp's tile. Every number of a tile's record (bias_table.h) has two
/// sums: a sum over the queries whose gradients are stored in place, and a sum over late queries, whose gradients are
/// stored one number later (TilePlan::late_rows). In accumulator order, the sums of numbers n and n + 8 are adjacent.
/// In shared memory, the smallest offsets of a warp's tile follow the warp's sums.
class RegionSums {
 public:
  CUTE_DEVICE RegionSums(const WholeBiasParams& p, char* raw) : p_(p), raw_(raw) {}

  /// Zeroes a warp's sums, and stores the smallest offsets of its tile. All warps have to call it before the CTA
  /// synchronizes.
  CUTE_DEVICE void plan(const TilePlan& tile) const {
    clear();
    if (threadIdx.x % 32 != 0) return;
    int* const least = least_of(threadIdx.x / 32);
    CUTE_UNROLL
    for (int d = 0; d < kRank; ++d) {
      least[p_.region.dimension[d]] = tile.has_rows ? tile.least_offset[d] : kNowhere;
    }
  }

  /// Adds the logit gradients of a warp's tile to its sums.
  template <class Element>
  CUTE_DEVICE void add(const TilePlan& tile) const {
    const Region& region = p_.region;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row_bytes = bytes_of_sums_row(region.record);
    std::uint32_t rows = shared_address(raw_) + region.shared.sums + warp * bytes_of_sums(region.record) +
                         lane % 16 * row_bytes + lane / 16 * 16,
                  sums = shared_address(warp_sums(warp)) + lane / 4 * 16;
    std::uint32_t b[2], r[4];
    columns_of_rows<Element>(b, tile);
    __syncwarp();
    load_matrices_transposed(r, rows);
    uint4 c = load_chunk(sums);
    CUTE_NO_UNROLL
    for (int i = region.record / kRecordStep; i > 0; --i) {
      // Only columns 0 and 1 of the product are used: the sums over rows that are stored in place, and over late rows.
      // The first lane of every four lanes has these columns.
      float d[4];
      HalfInstruction<Element>::fma(d[0], d[1], d[2], d[3], r[0], r[2], r[1], r[3], b[0], b[1], __uint_as_float(c.x),
                                    __uint_as_float(c.y), __uint_as_float(c.z), __uint_as_float(c.w));
      const std::uint32_t to = sums;
      rows += kBytesOfSum * kRecordStep;
      sums += kBytesOfStep;
      if (i > 1) {  // prefetch the operands of the next product
        load_matrices_transposed(r, rows);
        c = load_chunk(sums);
      }
      __syncwarp();  // all lanes have read the sums that are overwritten
      if (lane % 4 == 0) {
        store_words(to, d[0], d[1]);
        store_words(to + 8, d[2], d[3]);
      }
    }
    __syncwarp();
  }

  /// Adds up the sums of all warps, and writes them to the CTA's table in global memory. All warps with rows have to
  /// call it, after they have added the rows of all items and have synchronized. The entries of the table are
  /// distributed over these warps. For each entry, the warps' sums are added in the order of the warps.
  CUTE_DEVICE void write(const HeadItems& items) const {
    const Region& region = p_.region;
    // Distribute the entries over the warps that have rows.
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = region.warps;
    const unsigned with_rows =
        __ballot_sync(0xffffffffu, lane < warps && least_of(min(lane, warps - 1))[0] != kNowhere);
    const int first = __popc(with_rows & ((1u << warp) - 1)) * 32 + lane, step = __popc(with_rows) * 32;
    float* const to = p_.table_records + items.sum_index(p_) * region.gradients;
    CUTE_NO_UNROLL
    for (int entry = first; entry < region.gradients; entry += step) {
      int offset[kRank];
      const bool is_offset = p_.table_box.split(entry, offset);
      float result = 0.f;
      // Not unrolled: each instruction would execute only once or twice, so that instruction fetches would take half of
      // the time.
      CUTE_NO_UNROLL
      for (int i = 0; i < warps; ++i) {
        const int4 least = *reinterpret_cast<const int4*>(least_of(i));
        const int least_offset[] = {least.x, least.y, least.z};
        int index;
        if (p_.table_box.find(offset, least_offset, index) & is_offset) {
          result += warp_sums(i)[number_index(index)] + warp_sums(i)[number_index(index + 1) + 1];
        }
      }
      to[entry] = result;
    }
  }

 private:
  /// Zeroes a warp's sums.
  CUTE_DEVICE void clear() const {
    float4* const sums = reinterpret_cast<float4*>(warp_sums(threadIdx.x / 32));
    for (int i = threadIdx.x % 32; i < p_.region.record / 2; i += 32) sums[i] = make_float4(0.f, 0.f, 0.f, 0.f);
    __syncwarp();
  }

  /// Stands for the smallest offset of a tile without rows. It is larger than all offsets, so that the tile matches no
  /// entry.
  static constexpr int kNowhere = 1 << 20;
  /// Bytes of the sums that one MMA instruction computes.
  static constexpr int kBytesOfStep = 2 * sizeof(float) * kRecordStep;

  /// Returns the index of a number's sum over the rows that are stored in place. The next element is the number's sum
  /// over late rows.
  CUTE_DEVICE static unsigned number_index(unsigned number) {
    return number / kRecordStep * (2 * kRecordStep) + number % kColumns * 4 + number / kColumns % 2 * 2;
  }

  CUTE_DEVICE float* warp_sums(int warp) const {
    return reinterpret_cast<float*>(raw_ + p_.region.shared.region_sums) +
           2 * warp * (p_.region.record + kRecordHeader);
  }
  CUTE_DEVICE int* least_of(int warp) const { return reinterpret_cast<int*>(warp_sums(warp) + 2 * p_.region.record); }

  const WholeBiasParams& p_;
  char* raw_;
};

}  // namespace natten_jax::small
