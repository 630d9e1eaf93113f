// Items of a CTA in the kernel of whole layouts with a relative bias: batch entries of a single head, which share the
// head's table.
#pragma once

#include "cuda/small/copies.cuh"
#include "cuda/small/whole_bias.h"

namespace natten_jax::small {

/// Consecutive batch entries of a head; a single batch entry if entries have separate tables or scales. CTAs that run
/// concurrently process neighboring heads of the same batch entries, because these heads share cache lines.
struct HeadItems {
  static constexpr bool kPerEntry = false, kMayWrap = false, kIsPlain = false;

  int head, piece, first, count;

  HeadItems() = default;
  CUTE_DEVICE explicit HeadItems(const WholeBiasParams& p) {
    p.by_heads(piece, head, static_cast<int>(blockIdx.y));
    first = piece * p.region.items_of_cta;
    count = min(p.region.items_of_cta, p.entries_of_batch - first);
  }

  CUTE_DEVICE Item at(const CommonParams& p, int i) const { return Item(p, first + i, head); }
  CUTE_DEVICE void advance(const CommonParams& p, Item& item, int i) const { item = at(p, i); }

  /// Returns the index of the CTA's table of sums in global memory. The tables that are added up for one gradient are
  /// consecutive.
  CUTE_DEVICE std::int64_t sum_index(const WholeBiasParams& p) const {
    if (p.given.is_per_entry) return at(p, 0).number(p) * p.region.count + blockIdx.x;
    return (std::int64_t{head} * p.pieces + piece) * p.region.count + blockIdx.x;
  }
};

/// Relative bias table of a CTA's head. It is copied to each stage in shared memory once, and serves all items of the
/// CTA.
class HeadTable {
 public:
  CUTE_DEVICE HeadTable(const WholeBiasParams& p, char* raw)
      : p_(p), table_(shared_address(raw + p.region.shared.stages) + p.region.shared.table) {}

  /// Starts to copy the first item's table. All threads have to call this function and `finish`, and to synchronize
  /// afterwards.
  CUTE_DEVICE void start(const Item& first) const {
    const float* from = p_.given.head_table(first.number(p_), first.head);
    CUTE_NO_UNROLL
    for (int i = threadIdx.x; i < words(); i += blockDim.x) {
      const int offset = offset_of(i);
      copy_word_async(table_ + kBytesOfEntry * i, from + max(offset, 0), offset >= 0);
    }
    commit_copies();
  }

  /// Converts the biases that the thread copied to terms of products, and stores them in all stages.
  CUTE_DEVICE void finish(const Item& first) const {
    wait_copies<0>();
    const float scale = first.scale(p_).logits;
    CUTE_NO_UNROLL
    for (int i = threadIdx.x; i < words(); i += blockDim.x) {
      const std::uint32_t at = table_ + kBytesOfEntry * i;
      const float product = GivenTable::product_of(__uint_as_float(load_word(at)), scale);
      for (int stage = 0; stage < p_.region.stages; ++stage) {
        store_word(at + stage * p_.region.shared.stage_bytes, __float_as_uint(product));
      }
    }
  }

 private:
  /// Returns the number of words of the table in shared memory, including its margins, which are zeros.
  CUTE_DEVICE int words() const { return p_.region.table_entries + 2 * p_.region.table_margin; }
  CUTE_DEVICE int offset_of(int word) const {
    const int entry = word - p_.region.table_margin;
    return entry < 0 ? -1 : p_.given.offset_of(entry);
  }

  const WholeBiasParams& p_;
  std::uint32_t table_;
};

}  // namespace natten_jax::small
