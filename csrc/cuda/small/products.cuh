// Products of a warp's 16 rows with pairs of groups of columns.
#pragma once

#include "cuda/small/boxes.cuh"
#include "cuda/warp/mma.cuh"

namespace natten_jax::small {

/// Returns the address at which a lane reads chunks 2 * step and 2 * step + 1 of a pair's columns. `address` is the
/// lane's address for step 0.
CUTE_DEVICE std::uint32_t step_address(std::uint32_t address, int step) {
  return (address ^ (step % 4 * 32)) + step / 4 * 128;
}

/// A tile's rows as the A operand of MMA instructions.
template <class Element, int kHeadDim>
struct RowOperand {
  using Product = HalfProduct<Element>;
  using Tile = typename RowTile<kHeadDim>::Tile;
  static constexpr int kSteps = kHeadDim / 16;
  static constexpr bool kInRegisters = kHeadDim <= 64;

  typename Product::A a[kInRegisters ? kSteps : 1];
  std::uint32_t buffer;

  RowOperand() = default;
  CUTE_DEVICE explicit RowOperand(std::uint32_t buffer) : buffer(buffer) {
    if constexpr (kInRegisters) {
      const typename Product::template ReadA<Tile> read(buffer, 0);
      CUTE_UNROLL
      for (int step = 0; step < kSteps; ++step) read(a[step], 0, step);
    }
  }

  /// Loads rows that are also columns of a box; `address` is the lane's ldmatrix address.
  CUTE_DEVICE static RowOperand from_box(std::uint32_t address) {
    static_assert(kInRegisters);
    RowOperand result;
    CUTE_UNROLL
    for (int step = 0; step < kSteps; ++step) load_matrices(result.a[step].r, step_address(address, step));
    return result;
  }

  CUTE_DEVICE typename Product::A operator()(int step) const {
    if constexpr (kInRegisters) return a[step];
    typename Product::A result;
    const typename Product::template ReadA<Tile> read(buffer, 0);
    read(result, 0, step);
    return result;
  }
};

/// Accumulators of a pair of groups.
using PairLogits = float[2][4];

/// Addresses at which a lane reads a pair's columns.
struct PairAddresses {
  std::uint32_t across[2], along[2];  // in each array: addresses for the two kinds of products, as in Lanes
  std::uint32_t offset;               // byte offset of the pair in a stage
  std::uint32_t entries;              // relative bias: as in Tables; key biases: their address for the lane

  /// For a relative bias: distances in bytes to add to TilePlan::entry and to TilePlan::sums for this pair.
  CUTE_DEVICE int entry() const { return static_cast<int>(entries & 0xffff); }
  CUTE_DEVICE int sum() const { return static_cast<int>(entries >> kEntryBits); }
};

/// Pairs of groups that are computed together: their addresses in a stage, and the masks of their hidden (masked out)
/// elements in the format of `masks_of_group`.
template <int kCount_>
struct Pairs {
  static constexpr int kCount = kCount_;

  PairAddresses at[kCount];
  std::uint32_t masks[kCount];
};

/// Loads the relative bias of pairs of groups, which initializes the accumulators of products of queries and keys.
template <Owner kOwner, int kPairs>
CUTE_DEVICE void load_bias(PairLogits (&x)[kPairs], const TilePlan& tile, std::uint32_t stage,
                           const Pairs<kPairs>& pairs) {
  CUTE_UNROLL
  for (int i = 0; i < 8 * kPairs; ++i) {
    const int pair = i / 8, h = i / 4 % 2, r = i / 2 % 2, c = i % 2, pair_entry = pairs.at[pair].entry();
    const std::uint32_t at = stage + tile.entry[r] + (kOwner == Owner::kKeys ? -pair_entry : pair_entry) +
                             h * tile.next_entry_of_group + c * tile.next_entry;
    // Volatile, so that the compiler does not keep table entries in registers from one item to the next.
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x[pair][h][2 * r + c]) : "r"(at));
  }
}

/// If keys are columns, loads the key biases of pairs of groups, which initialize the accumulators of products of
/// queries and keys.
template <int kPairs>
CUTE_DEVICE void load_key_bias(PairLogits (&x)[kPairs], const Pairs<kPairs>& pairs) {
  CUTE_UNROLL
  for (int pair = 0; pair < kPairs; ++pair) {
    float (&first)[4] = x[pair][0], (&second)[4] = x[pair][1];
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(first[0]), "=f"(first[1]), "=f"(second[0]), "=f"(second[1])
                 : "r"(pairs.at[pair].entries));
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      first[2 + i] = first[i];
      second[2 + i] = second[i];
    }
  }
}

/// The array of columns that a product reads.
enum ColumnArray { kFirstArray, kSecondArray };

/// Multiplies the rows by each pair's columns in one array. With `kAdds`, adds the products to `x`. Otherwise `x`
/// becomes the sum of the products and of `initial`, whose four numbers are used for every group.
template <class Element, int kHeadDim, ColumnArray kArray, bool kAdds = false, int kPairs>
CUTE_DEVICE void multiply_columns(PairLogits (&x)[kPairs], const RowOperand<Element, kHeadDim>& rows,
                                  const Pairs<kPairs>& pairs, const float (&initial)[4] = {}) {
  using Instruction = HalfInstruction<Element>;
  constexpr int kSteps = kHeadDim / 16;
  CUTE_UNROLL
  for (int step = 0; step < kSteps; ++step) {
    std::uint32_t r[kPairs][4];
    CUTE_UNROLL
    for (int i = 0; i < kPairs; ++i) load_matrices(r[i], step_address(pairs.at[i].across[kArray], step));
    const auto a = rows(step);
    CUTE_UNROLL
    for (int i = 0; i < 2 * kPairs; ++i) {
      const int pair = i / 2, h = i % 2;
      float (&d)[4] = x[pair][h];
      const float* c = step > 0 || kAdds ? d : initial;
      Instruction::fma(d[0], d[1], d[2], d[3], a.r[0], a.r[1], a.r[2], a.r[3], r[pair][2 * h], r[pair][2 * h + 1], c[0],
                       c[1], c[2], c[3]);
    }
  }
}

/// Multiplies the weights of each pair by its columns in one array, and adds the products to `o`.
template <class Element, int kHeadDim, ColumnArray kArray, int kPairs>
CUTE_DEVICE void add_columns(float (&o)[kHeadDim / 8][4], const std::uint32_t (&weights)[kPairs][4],
                             const Pairs<kPairs>& pairs) {
  using Instruction = HalfInstruction<Element>;
  constexpr int kSteps = kHeadDim / 16;
  CUTE_UNROLL
  for (int pair = 0; pair < kPairs; ++pair) {
    CUTE_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      std::uint32_t r[4];
      load_matrices_transposed(r, step_address(pairs.at[pair].along[kArray], step));
      const auto& a = weights[pair];
      CUTE_UNROLL
      for (int h = 0; h < 2; ++h) {
        float (&c)[4] = o[2 * step + h];
        Instruction::fma(c[0], c[1], c[2], c[3], a[0], a[1], a[2], a[3], r[2 * h], r[2 * h + 1], c[0], c[1], c[2],
                         c[3]);
      }
    }
  }
}

// prmt selects each byte of its result by a hexadecimal digit of its selector; the highest digit selects the highest
// byte:
// - 0 to 3: byte 0 to 3 of the first word
// - 4 to 7: byte 0 to 3 of the second word
// - 8 to b: the sign bit of byte 0 to 3 of the first word, repeated eight times
//
// A mask hides an element if the top bit of its byte is set. The first word has the masks. If the second word is zero,
// selectors 0x8444, 0x9444 and so on compute -2^127 for a hidden element: the sign of its byte, then three bytes of
// zeros. Selectors 0x9988 and 0xbbaa set all bits in the half-words of hidden elements, for two elements at a time.

/// Returns the value to add to the exponent of one of the lane's four elements in a group: 0 if the element is visible,
/// -2^127 if the top bit of its mask is set.
CUTE_DEVICE float additive_mask(std::uint32_t masks, int element) {
  // The top bit of a selector digit replicates a byte's sign, which __byte_perm does not support.
  std::uint32_t result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(masks), "r"(0), "r"(0x8444 + 0x1000 * element));
  return __uint_as_float(result);
}

/// Returns half-word masks of two elements in the lane's first or second row of a group: all ones if hidden.
CUTE_DEVICE std::uint32_t hidden_halves(std::uint32_t masks, int row) {
  std::uint32_t result;
  asm("prmt.b32 %0, %1, %1, %2;" : "=r"(result) : "r"(masks), "r"(row == 0 ? 0x9988 : 0xbbaa));
  return result;
}

/// Spreads a lane's mask byte for a pair of groups over a word. The bits of the second group's four elements become the
/// top bits of the word's bytes. The bits of the first group are four bits lower.
CUTE_DEVICE std::uint32_t spread_bits(std::uint32_t bits) {
  return bits * (1u | 1u << 9 | 1u << 18 | 1u << 27);
}

/// Moves the mask bits of one group to the top of the word's bytes.
CUTE_DEVICE std::uint32_t masks_of_group(std::uint32_t masks, int group) {
  return masks << (4 * (1 - group));
}

/// Calls `call(pairs)` for a tile's pairs of groups. With `kAtOnce` 2, it processes two pairs at a time as far as
/// possible, so that the instructions of one pair hide the latency of the other. With `kAtOnce` 1, it processes one
/// pair at a time, which is slower but needs less code.
template <class Columns, int kAtOnce, Owner kOwner, Feature kFeature, class Call>
CUTE_DEVICE void for_pairs(const TilePlan& tile, const Tables& tables, int additional_pairs, std::uint32_t stage,
                           const Call& call) {
  constexpr bool kHasBias = kFeature == Feature::kRelativeBias,
                 kHasKeyBias = kFeature == Feature::kKeyBias && kOwner == Owner::kQueries;
  const auto for_range = [&](const Lanes& lanes, int first, int pairs) {
    const std::uint32_t across = stage + lanes.across, along = stage + lanes.along,
                        across_second = Columns::in_second(across, tables.second),
                        along_second = Columns::in_second(along, tables.second);
    const auto addresses = [&](std::uint32_t at, std::uint32_t entries) {
      return PairAddresses{{across + at, across_second + at}, {along + at, along_second + at}, at, entries};
    };
    const uint2* offsets = reinterpret_cast<const uint2*>(tables.offsets + first);
    const uint2* all_entries = reinterpret_cast<const uint2*>(tables.entries + first);
    const std::uint16_t* bits = tables.masks + 16 * first;
    std::uint32_t key_bias = kHasKeyBias ? tables.key_bias + first * kKeyBiasBytes : 0;
    if constexpr (kAtOnce == 1) {
      CUTE_NO_UNROLL
      for (int i = 0; i < pairs; ++i) {
        const std::uint32_t entries = kHasKeyBias ? key_bias + i * kKeyBiasBytes
                                      : kHasBias  ? tables.entries[first + i]
                                                  : 0;
        call(Pairs<1>{{addresses(tables.offsets[first + i], entries)},
                      {spread_bits(bits[i / 2 * 32] >> (i % 2 * 8) & 0xff)}});
      }
    } else {
      // Prefetch the offsets and masks of the next two pairs. The last prefetch reads past the end, and its result is
      // not used.
      uint2 at = *offsets, entries = kHasBias ? *all_entries : uint2{};
      std::uint32_t masks = *bits;
      CUTE_NO_UNROLL
      for (int i = pairs / 2; i > 0; --i) {
        if constexpr (kHasKeyBias) {
          entries = make_uint2(key_bias, key_bias + kKeyBiasBytes);
          key_bias += 2 * kKeyBiasBytes;
        }
        const Pairs<2> now{{addresses(at.x, entries.x), addresses(at.y, entries.y)},
                           {spread_bits(masks & 0xff), spread_bits(masks >> 8)}};
        at = *++offsets;
        if constexpr (kHasBias) entries = *++all_entries;
        masks = *(bits += 32);
        call(now);
      }
      if (pairs % 2 != 0)
        call(Pairs<1>{{addresses(at.x, kHasKeyBias ? key_bias : entries.x)}, {spread_bits(masks & 0xff)}});
    }
  };
  for_range(tile.lanes, 0, tile.pairs);
  if (additional_pairs > 0) for_range(tile.lanes_additional, (tile.pairs + 1) / 2 * 2, additional_pairs);
}

/// Computes unscaled logits of pairs of groups: products of the rows with the first array of columns, plus a relative
/// bias or key biases. If keys are columns, loads the key biases. If keys are rows, `row_biases` provides their biases,
/// in accumulator order.
template <class Element, int kHeadDim, Owner kOwner, Feature kFeature, int kPairs>
CUTE_DEVICE void multiply_keys(PairLogits (&x)[kPairs], const RowOperand<Element, kHeadDim>& rows, const TilePlan& tile,
                               std::uint32_t stage, const Pairs<kPairs>& pairs, const float (&row_biases)[4] = {}) {
  constexpr bool kHasBias = kFeature == Feature::kRelativeBias,
                 kHasKeyBias = kFeature == Feature::kKeyBias && kOwner == Owner::kQueries;
  if constexpr (kHasBias) load_bias<kOwner>(x, tile, stage, pairs);
  if constexpr (kHasKeyBias) load_key_bias(x, pairs);
  multiply_columns<Element, kHeadDim, kFirstArray, kHasBias || kHasKeyBias>(x, rows, pairs, row_biases);
}

}  // namespace natten_jax::small
