// Relative bias in kernels with a ring (ring_shape.h). Compute warps fill tables in shared memory, and read their
// biases from these tables.
#pragma once

#include <cutlass/arch/barrier.h>

#include "cuda/small/ring_strip.cuh"

namespace natten_jax::small {

/// Loads a float from shared memory. Volatile, so that the compiler does not reuse a value that was loaded earlier.
CUTE_DEVICE float load_float(std::uint32_t address) {
  float result;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(result) : "r"(address));
  return result;
}

/// In kernels without a relative bias, the functions have no effect.
template <class Params, bool kHasBias>
class RingRelativeBias {
 public:
  struct SlabBiases {
    CUTE_DEVICE void load(float (&)[2][4]) const {}
    CUTE_DEVICE void next_block() const {}
    CUTE_DEVICE void next_group(int) const {}
  };
  struct StepBiases {
    CUTE_DEVICE float add(float product, int, const int (&)[kRank]) const { return product; }
  };

  CUTE_DEVICE RingRelativeBias(const RingParams&, std::uint32_t) {}
  template <class Masks>
  CUTE_DEVICE void enter(const RingUnit&, const Masks&) const {}
  CUTE_DEVICE void start(int, int) const {}
  CUTE_DEVICE SlabBiases slab_biases() const { return {}; }
  CUTE_DEVICE void next_slab() const {}
  CUTE_DEVICE StepBiases step_biases(const RingUnit&, int) const { return {}; }
};

/// A table is indexed by the offset of a key from a query. If rows are queries, the address of an entry increases with
/// the coordinates of the column, a key. If rows are keys, it decreases with the coordinates of the column, a query.
/// For hidden (masked out) pairs of a query and a key, warps read arbitrary entries. These have to be finite if the
/// kernel masks by adding a number to the logit.
template <class Params>
class RingRelativeBias<Params, true> {
  static constexpr bool kRowsAreKeys = Params::kKernel == Kernel::kKeyValueGradient;
  static constexpr int kRowSign = kRowsAreKeys ? 1 : -1, kColumnSign = -kRowSign;

 public:
  /// The lane's biases for a slab, block by block.
  class SlabBiases {
   public:
    CUTE_DEVICE SlabBiases(const RingBias& bias, std::uint32_t at) : bias_(bias), at_(at) {}

    /// Loads the biases of a block as the initial accumulators of its products of queries and keys.
    CUTE_DEVICE void load(float (&x)[2][4]) const {
      CUTE_UNROLL
      for (int i = 0; i < 8; ++i) {
        const int h = i / 4, r = i / 2 % 2, e = i % 2;
        const int further = h * bias_.next_half + e * kRingEntryBytes;
        x[h][2 * r + e] = load_float(at_ + kRowSign * r * bias_.next_row + kColumnSign * further);
      }
    }
    CUTE_DEVICE void next_block() { at_ += kColumnSign * bias_.next_block; }
    CUTE_DEVICE void next_group(int blocks) { at_ += kColumnSign * (bias_.next_group - blocks * bias_.next_block); }

   private:
    const RingBias& bias_;
    std::uint32_t at_;
  };

  CUTE_DEVICE RingRelativeBias(const Params& p, std::uint32_t shared) : p_(p), shared_(shared) {}

  /// Starts a unit (RingUnit). If shared memory has no table for this unit, fills all tables. All compute warps have to
  /// call it for all units, because they fill the tables together.
  template <class Masks>
  CUTE_DEVICE void enter(const RingUnit& unit, const Masks& masks) {
    const int table = units_ % p_.bias.tables;
    if (table == 0) fill(units_);
    ++units_;
    const RingShape& shape = p_.shape;
    const int column = threadIdx.x % 4 * 2, wide_shift = logarithm(shape.wide);
    const RingStrip<kRowsAreKeys> strip(p_, unit);
    // Coordinates of the lane's first column in the warp's first block of a slab. Along the strip, this slab is assumed
    // to begin at the first token of the layout.
    const int group = masks.block / shape.group_blocks, inner = masks.block - group * shape.group_blocks,
              behind = column >> wide_shift;
    const bool is_thick = shape.thick > 1;
    const int across = strip.across + group * shape.wide + (column & (shape.wide - 1)),
              inside = strip.inside + (is_thick ? 0 : inner * (kBlockKeys >> wide_shift) + behind);
    first_ = row_address(unit, table) + kColumnSign * (across * p_.bias.pitch[0] + inside * p_.bias.pitch[1] +
                                                       (is_thick ? behind : 0) * p_.bias.pitch[2]);
  }

  /// Starts a step. `first_key` is the coordinate along the strip of the first slab that the step sees.
  CUTE_DEVICE void start(int step, int first_key) {
    at_ = first_ + kRowSign * (step * p_.shape.rows[2] - first_key) * p_.bias.pitch[2];
  }

  CUTE_DEVICE SlabBiases slab_biases() const { return {p_.bias, at_}; }
  CUTE_DEVICE void next_slab() { at_ += kColumnSign * p_.bias.next_slab; }

  /// Biases in a step of the current unit, for products that are recomputed.
  class StepBiases {
   public:
    CUTE_DEVICE StepBiases(const RingBias& bias, std::uint32_t row_address) : bias_(bias), row_address_(row_address) {}

    /// Adds a bias to a product. `row` is 0 or 1 and selects one of the lane's two rows. `column` has the coordinates
    /// of the column.
    CUTE_DEVICE float add(float product, int row, const int (&column)[kRank]) const {
      std::uint32_t at = row_address_ + kRowSign * row * bias_.next_row;
      CUTE_UNROLL
      for (int d = 0; d < kRank; ++d) at += kColumnSign * column[d] * bias_.pitch[d];
      return product + load_float(at);
    }

    /// Adds biases to the visible products of a block, in the order of RingTile::for_blocks.
    template <class IsVisible>
    CUTE_DEVICE void add(float (&x)[2][4], int, int across, const IsVisible& is_visible) const {
      CUTE_UNROLL
      for (int i = 0; i < 8; ++i) {
        const int column[] = {across + i / 4 * kColumns + static_cast<int>(threadIdx.x) % 4 * 2 + i % 2,
                              is_visible.inside, is_visible.along};
        float& product = x[i / 4][i % 4];
        if (is_visible(i)) product = add(product, i / 2 % 2, column);
      }
    }

   private:
    const RingBias& bias_;
    std::uint32_t row_address_;
  };
  CUTE_DEVICE StepBiases step_biases(const RingUnit& unit, int step) const {
    const int table = (units_ - 1) % p_.bias.tables;
    return {p_.bias, row_address(unit, table) + kRowSign * step * p_.shape.rows[2] * p_.bias.pitch[2]};
  }

 private:
  /// Fills all tables in shared memory. They are for the units that the CTA processes in the rounds from `round` on,
  /// one per round.
  CUTE_DEVICE void fill(int round) const {
    constexpr int kBarrier = 0;  // index among the named barriers that CUTLASS does not reserve
    const int warps = p_.shape.warps, table_count = p_.bias.tables, warp = ring_warp();
    if constexpr (!kRowsAreKeys) {
      if (round == 0) clear();
    }
    cutlass::arch::NamedBarrier::sync(32 * warps, kBarrier);  // no warp reads the old tables anymore
    // Warps are distributed over the tables, so that entries of all tables are loaded at the same time.
    const int table = warp % table_count, number = unit_of_round(p_, round + table);
    if (number < p_.units) {
      const RingUnit unit(p_, number);
      const int item = unit.batch * p_.heads + unit.head, step = 32 * ((warps - table + table_count - 1) / table_count);
      const float* const given = p_.given.head_table(item, unit.head);
      const float scale = p_.scale.for_head(item).logits;
      const std::uint32_t to = tables() + p_.bias.first + kRingEntryBytes * table * p_.bias.entries;
#pragma unroll 4
      for (int offset = warp / table_count * 32 + threadIdx.x % 32; offset < p_.given.offsets; offset += step) {
        int plane, line, index;
        p_.given.by_line(line, index, offset);
        p_.by_lines(plane, line, line);
        const int entry =
            plane * p_.bias.given_pitch[0] + line * p_.bias.given_pitch[1] + index * p_.bias.given_pitch[2];
        store_word(to + entry, __float_as_uint(GivenTable::product_of(__ldg(given + offset), scale)));
      }
    }
    cutlass::arch::NamedBarrier::sync(32 * warps, kBarrier);
  }

  /// Zeroes the memory of all tables, including the padding between and around them.
  CUTE_DEVICE void clear() const {
    const int threads = 32 * p_.shape.warps;
    for (int at = threadIdx.x * kRingEntryBytes; at < p_.bias.bytes; at += threads * kRingEntryBytes) {
      store_word(tables() + at, 0u);
    }
  }

  CUTE_DEVICE std::uint32_t tables() const { return shared_ + p_.shape.bytes - p_.bias.bytes; }

  /// Returns the address of the table entry for the lane's first row in a strip's first step and for the column at
  /// coordinates 0. If a tile of queries begins outside of the layout, it is moved to the layout's last query.
  CUTE_DEVICE std::uint32_t row_address(const RingUnit& unit, int table) const {
    int row[kRank];
    first_row(p_, unit, ring_warp(), row);
    std::uint32_t result = tables() + p_.bias.center + kRingEntryBytes * table * p_.bias.entries;
    CUTE_UNROLL
    for (int d = 0; d < kRank; ++d) {
      const int first = kRowsAreKeys ? row[d] : min(row[d], p_.axis[d].query_extent - 1);
      result += kRowSign * (first + row_coordinate(p_.shape, threadIdx.x % 32 / 4, d)) * p_.bias.pitch[d];
    }
    return result;
  }

  const Params& p_;
  std::uint32_t shared_;
  int units_ = 0;        // number of units entered so far
  std::uint32_t first_;  // address of the entry for the lane's first row in a strip's first step, and for its first
                         // column in a slab that begins at the first token of the layout
  std::uint32_t at_;     // address of the entry for the lane's first row and column in the current step and slab
};

}  // namespace natten_jax::small
