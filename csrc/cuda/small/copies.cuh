// Copies of a region's columns and rows into shared memory, and the order in which a CTA loops over its items (pairs of
// a batch entry and a query head).
#pragma once

#include "cuda/common/arithmetic.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/small/plan.cuh"
#include "cuda/warp/cp_async.cuh"
#include "cuda/warp/shared_tile.cuh"
#include "natten_jax/logsumexp.h"

namespace natten_jax::small {

/// A batch entry and a query head. A CTA computes its region for one item at a time.
struct Item {
  int batch;
  int head;
  int query_row;  // batch * queries * heads + head: the item's first row in arrays with a row per query and head
  int first_key;  // batch * keys

  CUTE_DEVICE Item(const CommonParams& p, int number) {
    p.by_heads(batch, head, number);
    find_rows(p);
  }
  CUTE_DEVICE Item(const CommonParams& p, int batch, int head) : batch(batch), head(head) { find_rows(p); }

  CUTE_DEVICE void next(const CommonParams& p) {
    ++query_row;
    if (++head == p.heads) {
      head = 0;
      ++batch;
      query_row += (p.queries - 1) * p.heads;
      first_key += p.keys;
      additional += p.additional_kv;
    }
  }

  CUTE_DEVICE HeadScale scale(const CommonParams& p) const { return p.scale.for_head(batch * p.heads + head); }
  /// Returns the factor that converts products of queries and keys to logits in base 2.
  CUTE_DEVICE float exponent_scale(const CommonParams& p) const { return scale(p).logits * kLog2E; }

  /// Returns the item's index among all items of the launch.
  CUTE_DEVICE int number(const CommonParams& p) const { return batch * p.heads + head; }

  /// Returns the head's relative bias.
  CUTE_DEVICE const float* table(const CommonParams& p) const {
    return p.relative_bias + std::int64_t{p.is_table_shared ? head : number(p)} * p.region.table_entries;
  }

  /// Returns the head's sink as passed by the caller, or -infinity without sinks.
  CUTE_DEVICE float sink(const ForwardParams& p) const {
    return p.sinks == nullptr ? -INFINITY : __ldcg(p.sinks + (p.are_sinks_shared ? head : number(p)));
  }

  CUTE_DEVICE int head_kv(const CommonParams& p) const { return p.by_heads_per_kv.divide(head); }

  /// Returns the item's first row in arrays with a row per key and key/value head.
  CUTE_DEVICE int key_row(const CommonParams& p) const { return first_key * p.heads_kv + head_kv(p); }
  CUTE_DEVICE int additional_row(const CommonParams& p) const { return additional * p.heads_kv + head_kv(p); }

 private:
  CUTE_DEVICE void find_rows(const CommonParams& p) {
    query_row = batch * p.queries * p.heads + head;
    first_key = batch * p.keys;
    additional = batch * p.additional_kv;
  }

  int additional;  // batch * additional_kv
};

/// Returns the address of a row of an array whose rows have `width` elements of 16 bits.
template <class Byte>
CUTE_DEVICE Byte* row_of(Byte* array, int row, int width) {
  using Char = std::conditional_t<std::is_const_v<Byte>, const char, char>;
  return const_cast<Char*>(advance(static_cast<const char*>(array), row, 2 * width));
}

/// The part of a region's columns that a thread copies from global to shared memory: one chunk of every `n`-th column,
/// from one of two arrays. `n` is the number of columns that the CTA copies at a time. In shared memory, one row holds
/// a column's chunks of both arrays, so that reads of both arrays use the same row address.
template <int kHeadDim>
struct ColumnCopy {
  static constexpr int kChunks = kHeadDim / 4, kArrayChunks = kHeadDim / 8, kAtOnce = 4;
  int chunk, token_bytes, chunk_bytes;
  bool is_second;

  CUTE_DEVICE ColumnCopy(int heads, int first_width, int second_width)
      : chunk(threadIdx.x % kChunks), is_second(chunk >= kArrayChunks) {
    const int width = is_second ? second_width : first_width;
    token_bytes = heads * 2 * width;
    chunk_bytes = chunk % kArrayChunks * 8 < width ? 16 : 0;
  }

  /// Returns the address of the thread's chunk in the first row of its array. If the chunk lies past the head's width,
  /// the address is any valid one, because no bytes are copied from it.
  CUTE_DEVICE const char* source(const void* first, const void* second) const {
    return static_cast<const char*>(is_second ? second : first) + (chunk_bytes == 0 ? 0 : chunk % kArrayChunks * 16);
  }

  /// Starts to copy a region's columns of two arrays: `first` and `second` are the addresses of an item's first rows.
  CUTE_DEVICE void box(const Tables& tables, const void* first, const void* second, std::uint32_t stage) const {
    const char* const source = this->source(first, second);
    const std::uint32_t flip = (chunk & 7) << 4;
    stage += (chunk >> 3) * 128;
    const int step = blockDim.x / kChunks;
    const int2* offsets = tables.column_offsets + threadIdx.x / kChunks;
    const auto copy_columns = [&](auto count) {
      int2 column[count];
      CUTE_UNROLL
      for (int i = 0; i < count; ++i) column[i] = offsets[i * step];
      CUTE_UNROLL
      for (int i = 0; i < count; ++i) {
        copy_chunk((stage + column[i].y) ^ flip, advance(source, column[i].x, token_bytes), chunk_bytes);
      }
      offsets += count * step;
    };
    int passes = tables.full_passes;
    CUTE_NO_UNROLL
    for (; passes >= kAtOnce; passes -= kAtOnce) copy_columns(std::integral_constant<int, kAtOnce>{});
    CUTE_NO_UNROLL
    for (; passes > 0; --passes) copy_columns(std::integral_constant<int, 1>{});
    if (offsets < tables.column_offsets + tables.columns) copy_columns(std::integral_constant<int, 1>{});
  }

  /// Starts to copy the keys and values that a region's queries see, and the additional keys and values.
  template <class Params>
  CUTE_DEVICE void keys(const Params& p, const Tables& tables, const Item& item, std::uint32_t stage) const {
    const int key_row = item.key_row(p);
    box(tables, row_of(p.key, key_row, p.head_dim), row_of(p.value, key_row, p.head_dim_v), stage);
    if (p.additional_kv == 0) return;
    const int additional_row = item.additional_row(p);
    sequence(p.additional_kv,
             source(row_of(p.additional_keys, additional_row, p.head_dim),
                    row_of(p.additional_values, additional_row, p.head_dim_v)),
             stage + p.region.shared.additional);
  }

  /// Starts to copy columns that are consecutive in global memory and in shared memory.
  CUTE_DEVICE void sequence(int columns, const char* source, std::uint32_t additional) const {
    for (int i = threadIdx.x / kChunks; i < columns; i += blockDim.x / kChunks) {
      const std::uint32_t row = additional + i * (4 * kHeadDim) + (chunk >> 3) * 128;
      copy_chunk(row + (((chunk ^ i) & 7) << 4), advance(source, i, token_bytes), chunk_bytes);
    }
  }
};

/// Starts to copy an item's relative bias into a stage.
CUTE_DEVICE void copy_table(const CommonParams& p, const Item& item, std::uint32_t stage) {
  const float* from = item.table(p);
  const std::uint32_t to = stage + p.region.shared.table + 4 * p.region.table_margin;
  for (int i = threadIdx.x * kEntriesOfChunk; i < p.region.table_entries; i += blockDim.x * kEntriesOfChunk) {
    copy_chunk(to + 4 * i, reinterpret_cast<const char*>(from + i), 16);
  }
}

/// Copies the rows of a warp's tile between global memory and buffers in shared memory, one buffer per array.
template <int kHeadDim>
struct RowTile {
  using Tile = SharedTile<2 * kHeadDim>;
  static constexpr int kBytes = kRows * Tile::kRowBytes;
  static constexpr int kPasses = kRows * Tile::kChunks / 32, kStep = 32 / Tile::kChunks;  // kStep: rows per pass

  /// Starts to copy a tile's rows of one array into a buffer. `source` is the address of the item's first row, and
  /// `row_indices` is the warp's Tables::row_indices.
  CUTE_DEVICE static void copy(const int2* row_indices, const void* source, int head_dim, std::uint32_t buffer) {
    const int lane = threadIdx.x % 32, chunk = lane % Tile::kChunks, row = lane / Tile::kChunks;
    const bool is_inside = chunk * 8 < head_dim;
    const char* from = static_cast<const char*>(source) + (is_inside ? chunk * 16 : 0);
    const std::uint32_t to = buffer + Tile::offset(row, chunk);
    const RowIndices indices(row_indices, row);
    CUTE_UNROLL
    for (int i = 0; i < kPasses; ++i) {
      const int index = indices(i);
      copy_chunk(Tile::later_row(to, i * kStep), advance(from, max(index, 0), head_dim * 2),
                 is_inside && index >= 0 ? 16 : 0);
    }
  }

  /// Multiplies a warp's accumulators by `low` in the lane's first row and by `high` in its second row, rounds them,
  /// and stores them to global memory through a buffer in shared memory.
  template <class Element>
  CUTE_DEVICE static void store(const float (&o)[kHeadDim / 8][4], float low, float high, const int2* row_indices,
                                void* destination, int head_dim, std::uint32_t buffer) {
    const int lane = threadIdx.x % 32, chunk = lane % Tile::kChunks, row = lane / Tile::kChunks;
    __syncwarp();
    if constexpr (kStoresMatrices) {
      const typename Tile::Lane lane_address(buffer, lane % 16, lane / 16);
      CUTE_UNROLL
      for (int i = 0; i < kHeadDim / 8; i += 2) {
        store_matrices(lane_address.at(0, i),
                       {pack<Element>(o[i][0] * low, o[i][1] * low), pack<Element>(o[i][2] * high, o[i][3] * high),
                        pack<Element>(o[i + 1][0] * low, o[i + 1][1] * low),
                        pack<Element>(o[i + 1][2] * high, o[i + 1][3] * high)});
      }
    } else {
      const typename Tile::Lane lane_address(buffer, lane / 4, 0);
      CUTE_UNROLL
      for (int i = 0; i < kHeadDim / 8; ++i) {
        const std::uint32_t at = lane_address.at(0, i) + lane % 4 * 4;
        store_word(at, pack<Element>(o[i][0] * low, o[i][1] * low));
        store_word(at + 8 * Tile::kRowBytes, pack<Element>(o[i][2] * high, o[i][3] * high));
      }
    }
    __syncwarp();
    if (chunk * 8 >= head_dim) return;
    const char* to = static_cast<const char*>(destination) + chunk * 16;
    const RowIndices indices(row_indices, row);
    const std::uint32_t from = buffer + Tile::offset(row, chunk);
    CUTE_UNROLL
    for (int i = 0; i < kPasses; ++i) {
      const int index = indices(i);
      const uint4 words = load_chunk(Tile::later_row(from, i * kStep));
      if (index >= 0) store_chunk(advance(to, index, head_dim * 2), words);
    }
  }

 private:
  /// Array indices of the rows that a lane copies, one row per pass. In the first pass, it copies row `row` of the
  /// tile.
  struct RowIndices {
    int2 pairs[kPasses / 2];

    CUTE_DEVICE RowIndices(const int2* row_indices, int row) {
      CUTE_UNROLL
      for (int i = 0; i < kPasses / 2; ++i) pairs[i] = row_indices[row + i * kStep];
    }
    CUTE_DEVICE int operator()(int pass) const {
      const int2 both = pairs[pass % (kPasses / 2)];
      return pass < kPasses / 2 ? both.x : both.y;
    }
  };
};

/// Zeroes memory from `begin` to `end`, both multiples of 16 bytes.
CUTE_DEVICE void clear(char* begin, char* end) {
#pragma unroll 4
  for (char* at = begin + threadIdx.x * 16; at < end; at += blockDim.x * 16) {
    *reinterpret_cast<uint4*>(at) = make_uint4(0, 0, 0, 0);
  }
}

/// The items of a CTA, which have consecutive indices.
struct CtaItems {
  static constexpr bool kPerEntry = false, kMayWrap = false, kIsPlain = false;

  int first, count;

  CtaItems() = default;
  CUTE_DEVICE explicit CtaItems(const CommonParams& p)
      : first(blockIdx.y * p.region.items_of_cta), count(min(p.region.items_of_cta, p.items - first)) {}

  CUTE_DEVICE Item at(const CommonParams& p, int i) const { return Item(p, first + i); }

  /// Advances `item` from item `i - 1` to item `i`, the last argument.
  CUTE_DEVICE void advance(const CommonParams& p, Item& item, int) const { item.next(p); }
};

/// Like CtaItems, but for plain problems, whose arrays are the complete layout (CommonParams::is_plain). With
/// PlainItems, the plan of a forward pass has 430 instructions fewer than the 3,000 with CtaItems.
struct PlainItems : CtaItems {
  static constexpr bool kIsPlain = true;

  PlainItems() = default;
  CUTE_DEVICE explicit PlainItems(const CommonParams& p) : CtaItems(p) {
    // Make the count opaque to the compiler, which would otherwise compute it again for each item. The computation
    // takes 8 of the 286 instructions per item that a forward pass executes outside of its loop over columns.
    count = static_cast<int>(keep_in_register(static_cast<std::uint32_t>(count)));
  }
};

/// The items of one plan of a CTA, with per-entry layouts. Their numbers are consecutive when the CTA's batch entries
/// are numbered as in `order`.
struct EntryItems {
  static constexpr bool kPerEntry = true, kMayWrap = false, kIsPlain = false;

  int first, count;
  const std::uint8_t* order;  // the CTA's entries, sorted by plan
  unsigned entries;           // one bit per entry that uses the plan
  int first_entry;            // the batch entry with index 0 in `order` and bit 0 in `entries`
  int maps;                   // the entry whose tensor maps all items use; negative: the launch's maps

  CUTE_DEVICE Item at(const CommonParams& p, int i) const {
    int index, head;
    p.by_heads(index, head, first + i);
    return Item(p, first_entry + order[index], head);
  }

  /// Advances to the next item. The next batch entry is computed from `entries`, because a lookup in `order` took 7% of
  /// a pass. The next head of the same entry is a separate case, because this code needs fewer registers.
  CUTE_DEVICE void advance(const CommonParams& p, Item& item, int) const {
    if (item.head + 1 < p.heads) {
      item.next(p);
    } else {
      item = Item(p, item.batch + __ffs(static_cast<int>(entries >> (item.batch - first_entry) >> 1)), 0);
    }
  }
};

/// Loads of a region's columns on any architecture: all threads copy chunks. A stage in shared memory holds the columns
/// of one item, and the warps' rows. With one stage, the next item is loaded after the current one has been computed.
/// With two stages, it is loaded during that computation.
template <class Items>
class ChunkLoads {
 public:
  static constexpr bool kMayWrap = Items::kMayWrap, kIsPlain = Items::kIsPlain, kHasResultsInRows = true;

  /// Hooks that `compute` calls. They do nothing, because no loads start during the computation.
  struct Phases {
    CUTE_DEVICE void rows_are_read() const {}
    CUTE_DEVICE void columns_are_read() const {}
    CUTE_DEVICE void results_are_written() const {}
  };

  CUTE_DEVICE ChunkLoads(const CommonParams& p, char*) : p_(p) {}

  /// Sets the items of the next plan.
  CUTE_DEVICE void take(const Items& items, bool) { items_ = items; }

  CUTE_DEVICE void start(const int (&)[kRank], int, bool = false) const {}

  template <class LoadRows>
  CUTE_DEVICE void load_first_rows(const Item&, std::uint32_t, const LoadRows&) const {}

  /// Loops over the items. For each item, `load_rows(item, rows)` starts to copy a warp's rows, and `load_columns(item,
  /// stage)` starts to copy the columns with all threads. Then `compute(item, stage, rows, phases)` uses these copies.
  /// All warps have to call this function.
  template <class LoadRows, class LoadColumns, class Compute>
  CUTE_DEVICE void for_items(const Tables& tables, const TilePlan&, std::uint32_t rows_of_warp,
                             const LoadRows& load_rows, const LoadColumns& load_columns, const Compute& compute) const {
    wait_for_previous_kernel();
    // Clear the stages, because the kernel also reads memory that no copy writes, and the numbers there have to be
    // finite.
    clear(tables.stages, tables.stages + p_.region.stages * p_.region.shared.stage_bytes);
    __syncthreads();
    const Items& items = items_;
    const std::uint32_t stages = shared_address(tables.stages), rows = p_.region.shared.rows + rows_of_warp,
                        step = p_.region.stages > 1 ? p_.region.shared.stage_bytes : 0;
    Item item = items.at(p_, 0), loaded = item;
    const auto load = [&](std::uint32_t stage) {
      load_rows(loaded, stage + rows);
      load_columns(loaded, stage);
      commit_copies();
    };
    load(stages);
    for (int i = 0; i < items.count; ++i) {
      const std::uint32_t stage = stages + (i & 1) * step;
      const bool is_more = i + 1 < items.count;
      const auto load_next = [&] {
        items.advance(p_, loaded, i + 1);
        load(stages + (~i & 1) * step);
      };
      wait_copies<0>();
      __syncthreads();
      if (step > 0 && is_more) load_next();
      compute(item, stage, stage + rows, Phases{});
      items.advance(p_, item, i + 1);
      if (step == 0 && is_more) {
        __syncthreads();
        load_next();
      }
    }
  }

 private:
  const CommonParams& p_;
  Items items_;
};

}  // namespace natten_jax::small
