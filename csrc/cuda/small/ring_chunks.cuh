// Loads the slabs and tiles of a ring (ring_shape.h) on all architectures. Warps copy chunks of 16 bytes. With TMA
// (ring_walk.cuh), data has the same layout in shared memory, so that both methods share the code of compute warps.
#pragma once

#include "cuda/small/boxes.cuh"
#include "cuda/small/ring_barriers.cuh"
#include "cuda/small/ring_strip.cuh"

namespace natten_jax::small {

/// Main loop of a loader warp that copies chunks. It copies one of the two arrays of each slab, and every second tile
/// of each step. It copies the data in the order in which the steps need it. A single loader warp, with two to four
/// copies in flight, was too slow: a copy of 512 bytes took 60 to 110 cycles on an H100. Therefore there are two loader
/// warps, and each one computes the addresses of eight copies before it starts them.
template <class Params, int kHeadDim>
class RingChunks {
 public:
  CUTE_DEVICE RingChunks(const Params& p, const RingAlong& along, int warp, std::uint32_t shared,
                         RingBarriers<RingLoads::kChunks>& barriers)
      : p_(p),
        along_(along),
        barriers_(barriers),
        shared_(shared),
        warp_(warp),
        row_(threadIdx.x % 32 / kChunks),
        chunk_(threadIdx.x % kChunks) {
    CUTE_UNROLL
    for (int pass = 0; pass < kTilePasses; ++pass) {
      in_tile_[pass] = 0;
      CUTE_UNROLL
      for (int d = 0; d < kRank; ++d) in_tile_[pass] += coordinate_in_tile(pass, d) * p.pitch[d];
    }
  }

  /// Copies slabs and tiles in the order in which the steps need them.
  CUTE_DEVICE void load() const {
    const RingShape& shape = p_.shape;
    RingPosition position;
    int warp_set = 0;
    unsigned parities = 0;  // parities of the tiles' barriers: one bit per warp set (RingShape::warp_sets)
    for (int round = 0, number; (number = unit_of_round(p_, round)) < p_.units; ++round) {
      const RingUnit unit(p_, number);
      const Slabs slabs(*this, unit);
      int loaded = along_.step_slabs(unit.step).x;
      for (int step = unit.step; step < unit.end; ++step) {
        if constexpr (kTileArrays > 0) {
          copy_tiles(unit, step, warp_set, (parities >> warp_set & 1) ^ 1);
          parities ^= 1u << warp_set;
          if (++warp_set == shape.warp_sets()) warp_set = 0;
        }
        for (const int end = along_.step_slabs(step).y; loaded < end; ++loaded) {
          wait_for(barriers_.empty[position.slot], position.parity ^ 1);
          copy_slab(slabs, along_.first_key(loaded), position.slot);
          arrive_with_copies(barriers_.full[position.slot]);
          position.advance(shape.slots);
        }
      }
    }
    wait_copies<0>();
  }

 private:
  static constexpr bool kRowsAreKeys = Params::kKernel == Kernel::kKeyValueGradient;
  static constexpr int kTileArrays = ring_tile_arrays(Params::kKernel);
  static constexpr int kLoaders = ring_loaders(RingLoads::kChunks);
  static_assert(kLoaders == 2);
  // Bytes of a row of an array, number of chunks of a row, and number of rows that a warp copies at once. Each lane
  // then copies one chunk.
  static constexpr int kRowBytes = 2 * kHeadDim, kChunks = kHeadDim / 8, kAtOnce = 32 / kChunks;
  static constexpr int kTilePasses = kRows / kAtOnce;
  static constexpr int kBlockPasses = kBlockKeys / kAtOnce, kBlocksAtOnce = 8 / kBlockPasses;

  /// Returns the shared memory address to which the lane copies a chunk in pass `pass` over a block or a tile, which
  /// begins at address `rows`.
  CUTE_DEVICE std::uint32_t chunk_target(std::uint32_t rows, int pass) const {
    return chunk_address<kHeadDim>(rows, row_ + pass * kAtOnce, chunk_);
  }

  /// Returns the coordinate in dimension `d`, relative to the tile, of the row that the lane copies in pass `pass`.
  CUTE_DEVICE int coordinate_in_tile(int pass, int d) const {
    return row_coordinate(p_.shape, row_ + pass * kAtOnce, d);
  }

  /// Returns the global memory address of the lane's chunk in a head's first row.
  CUTE_DEVICE const char* first_row_of(const void* array, int batch, int head, int heads) const {
    const std::int64_t row = std::int64_t{batch} * p_.tokens * heads + head;
    return static_cast<const char*>(array) + row * kRowBytes + 16 * chunk_;
  }

  /// Copies this warp's share of the tiles of a step. `warp_set` selects the buffers of the tiles. The buffers are free
  /// when their barriers have completed the phase with parity `parity`.
  CUTE_DEVICE void copy_tiles(const RingUnit& unit, int step, int warp_set, int parity) const {
    const RingShape& shape = p_.shape;
    const int adjacent = shape.adjacent[0] * shape.adjacent[1];
    int x = warp_, y = 0;  // coordinates of the tile's compute warp among the adjacent warps
    for (int i = warp_; i < adjacent; i += kLoaders, x += kLoaders) {
      for (; x >= shape.adjacent[0]; x -= shape.adjacent[0]) ++y;
      const int reader = warp_set * adjacent + i;
      wait_for(barriers_.has_room[reader], parity);
      copy_tile(unit, reader,
                {(unit.across * shape.adjacent[0] + x) * shape.rows[0],
                 (unit.inside * shape.adjacent[1] + y) * shape.rows[1], step * shape.rows[2]});
      arrive_with_copies(barriers_.has_tile[reader]);
    }
  }

  /// Copies a compute warp's tile from each array. `first` has the coordinates of the tile's first row. Rows outside of
  /// the layout are set to zero.
  CUTE_DEVICE void copy_tile(const RingUnit& unit, int reader, const int (&first)[kRank]) const {
    const RingShape& shape = p_.shape;
    int token = 0;
    bool is_whole = true;
    CUTE_UNROLL
    for (int d = 0; d < kRank; ++d) {
      token += first[d] * p_.pitch[d];
      is_whole &= first[d] + shape.rows[d] <= p_.axis[d].query_extent;
    }
    int tokens[kTilePasses];
    CUTE_UNROLL
    for (int pass = 0; pass < kTilePasses; ++pass) {
      tokens[pass] = token + in_tile_[pass];
      if (is_whole) continue;
      CUTE_UNROLL
      for (int d = 0; d < kRank; ++d) {
        if (first[d] + coordinate_in_tile(pass, d) >= p_.axis[d].query_extent) tokens[pass] = -1;
      }
    }
    std::uint32_t to = shared_ + shape.tiles + kTileArrays * reader * shape.tile_bytes;
    CUTE_UNROLL
    for (int array = 0; array < kTileArrays; ++array, to += shape.tile_bytes) {
      const char* const from = first_row_of(p_.rows_of(array), unit.batch, unit.head, p_.heads);
      CUTE_UNROLL
      for (int pass = 0; pass < kTilePasses; ++pass) {
        copy_chunk(chunk_target(to, pass), advance(from, max(tokens[pass], 0), p_.heads * kRowBytes),
                   tokens[pass] >= 0 ? 16 : 0);
      }
    }
  }

  /// Values that are the same for all slabs of a unit. A block extends in two dimensions of the shape: in 0 and 2 if
  /// slabs are thick (RingShape::thick), and in 0 and 1 otherwise.
  struct Slabs {
    const char* from;          // address of the lane's chunk for the head's first token
    const float4* statistics;  // statistics of the head's first token
    int token_bytes;
    int across;       // coordinate of the lane's first column in dimension 0
    int inside;       // its coordinate in dimension 1; if slabs are thick, in dimension 2 relative to the slab
    int first_token;  // its token, in a slab that begins at the first token of the layout

    CUTE_DEVICE Slabs(const RingChunks& chunks, const RingUnit& unit) {
      const Params& p = chunks.p_;
      const RingStrip<kRowsAreKeys> strip(p, unit);
      const int head = kRowsAreKeys ? unit.head : unit.head_kv(p), heads = kRowsAreKeys ? p.heads : p.heads_kv;
      from = chunks.first_row_of(p.columns_of(chunks.warp_), unit.batch, head, heads);
      statistics = nullptr;
      if constexpr (kRowsAreKeys) statistics = p.statistics + std::int64_t{unit.batch} * p.tokens * heads + head;
      token_bytes = heads * kRowBytes;
      const bool is_thick = p.shape.thick > 1;
      across = strip.across + (chunks.row_ & (p.shape.wide - 1));
      inside = (is_thick ? 0 : strip.inside) + (chunks.row_ >> logarithm(p.shape.wide));
      first_token = across * p.pitch[0] + inside * (is_thick ? p.pitch[2] : p.pitch[1]);
    }
  };

  /// The lane's first column in the next block of a slab.
  struct NextBlock {
    int across, inside, token, remaining;  // remaining: blocks of the group that are not copied yet
    int group_token;                       // token of the lane's first column in the group's first block
    std::uint32_t to;
  };

  /// Copies a slab of this warp's array. Columns outside of the layout are set to zero.
  CUTE_DEVICE void copy_slab(const Slabs& slabs, int first_column, int slot) const {
    const RingShape& shape = p_.shape;
    const bool is_thick = shape.thick > 1;
    // A slab that is not thick may lie outside of the layout. Its columns then get negative coordinates, so that they
    // are set to zero.
    const bool is_outside = !is_thick && static_cast<unsigned>(first_column) >= static_cast<unsigned>(along_.length());
    const int token = slabs.first_token + first_column * p_.pitch[2];
    const NextBlock first{is_outside ? -shape.wide * shape.groups : slabs.across,
                          slabs.inside + (is_thick ? first_column : 0),
                          token,
                          shape.group_blocks,
                          token,
                          shared_ + (2 * slot + warp_) * shape.array_bytes};
    NextBlock next = first;
    int remaining = shape.groups * shape.group_blocks;
    CUTE_NO_UNROLL
    for (; remaining >= kBlocksAtOnce; remaining -= kBlocksAtOnce)
      copy_blocks<kBlocksAtOnce>(slabs, first.inside, next);
    CUTE_NO_UNROLL
    for (; remaining > 0; --remaining) copy_blocks<1>(slabs, first.inside, next);
    if constexpr (kRowsAreKeys) {
      if (warp_ == 0) copy_statistics(slabs, first_column, slot);
    }
  }

  /// Copies `kCount` blocks of a slab. Each copy has a separate address register, because a copy occupies its register
  /// until the memory pipe accepts the copy.
  template <int kCount>
  CUTE_DEVICE void copy_blocks(const Slabs& slabs, int first_inside, NextBlock& next) const {
    const RingShape& shape = p_.shape;
    const bool is_thick = shape.thick > 1;
    const int deeper = kAtOnce >> logarithm(shape.wide),
              extent_inside = is_thick ? along_.length() : p_.axis[1].query_extent,
              next_pass = deeper * (is_thick ? p_.pitch[2] : p_.pitch[1]);
    const char* source[kCount][kBlockPasses];
    int bytes[kCount][kBlockPasses];
    CUTE_UNROLL
    for (int b = 0; b < kCount; ++b) {
      CUTE_UNROLL
      for (int pass = 0; pass < kBlockPasses; ++pass) {
        const bool is_inside =
            static_cast<unsigned>(next.across) < static_cast<unsigned>(p_.axis[0].query_extent) &&
            static_cast<unsigned>(next.inside + pass * deeper) < static_cast<unsigned>(extent_inside);
        bytes[b][pass] = is_inside ? 16 : 0;
        source[b][pass] = address_of(slabs.from, is_inside ? next.token + pass * next_pass : 0, slabs.token_bytes);
      }
      const bool is_last = --next.remaining == 0;
      next.across += is_last ? shape.wide : 0;
      next.group_token += is_last ? shape.wide * p_.pitch[0] : 0;
      next.token = is_last ? next.group_token : next.token + kBlockPasses * next_pass;
      next.inside = is_last ? first_inside : next.inside + kBlockPasses * deeper;
      next.remaining = is_last ? shape.group_blocks : next.remaining;
    }
    CUTE_UNROLL
    for (int b = 0; b < kCount; ++b) {
      CUTE_UNROLL
      for (int pass = 0; pass < kBlockPasses; ++pass) {
        copy_chunk(chunk_target(next.to, pass) + b * kBlockKeys * kRowBytes, source[b][pass], bytes[b][pass]);
      }
    }
    next.to += kCount * kBlockKeys * kRowBytes;
  }

  /// Like `advance`, but volatile, so that the compiler does not move the computation of an address past a copy.
  CUTE_DEVICE static const char* address_of(const char* base, int token, int token_bytes) {
    const char* result;
    asm volatile("mad.wide.s32 %0, %1, %2, %3;" : "=l"(result) : "r"(token), "r"(token_bytes), "l"(base));
    return result;
  }

  /// Copies the statistics of a slab's columns.
  CUTE_DEVICE void copy_statistics(const Slabs& slabs, int first_column, int slot) const {
    const RingShape& shape = p_.shape;
    const bool is_thick = shape.thick > 1;
    const int wide_shift = logarithm(shape.wide), columns_per_group = shape.group_blocks * kBlockKeys,
              lane = threadIdx.x % 32, columns = shape.groups * columns_per_group,
              pitch = is_thick ? p_.pitch[2] : p_.pitch[1],
              extent = is_thick ? along_.length() : p_.axis[1].query_extent,
              across = slabs.across - (row_ & (shape.wide - 1)),
              inside = slabs.inside - (row_ >> wide_shift) + (is_thick ? first_column : 0);
    const bool is_slab_inside =
        is_thick || static_cast<unsigned>(first_column) < static_cast<unsigned>(along_.length());
    const std::uint32_t to = shared_ + shape.statistics + slot * columns * kStatisticsBytes;
    int group = 0, group_column = lane;
    for (int column = lane; column < columns; column += 32, group_column += 32) {
      for (; group_column >= columns_per_group; group_column -= columns_per_group) ++group;
      const int x = across + group * shape.wide + (group_column & (shape.wide - 1)),
                y = inside + (group_column >> wide_shift);
      const bool is_inside = is_slab_inside &&
                             static_cast<unsigned>(x) < static_cast<unsigned>(p_.axis[0].query_extent) &&
                             static_cast<unsigned>(y) < static_cast<unsigned>(extent);
      const int token = is_inside ? x * p_.pitch[0] + y * pitch + (is_thick ? 0 : first_column * p_.pitch[2]) : 0;
      copy_chunk(to + column * kStatisticsBytes,
                 reinterpret_cast<const char*>(slabs.statistics + std::int64_t{token} * p_.heads), is_inside ? 16 : 0);
    }
  }

  const Params& p_;
  const RingAlong& along_;
  RingBarriers<RingLoads::kChunks>& barriers_;
  std::uint32_t shared_;
  int warp_;                  // index among the loader warps
  int row_, chunk_;           // of the rows that the warp copies at once, the lane copies chunk `chunk_` of row `row_`
  int in_tile_[kTilePasses];  // distances in tokens from a tile's first row to the rows that the lane copies
};

}  // namespace natten_jax::small
