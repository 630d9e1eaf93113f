// A warp's products of its 16 rows with pairs of groups of columns.
#pragma once

#include "cuda/sm80/products.cuh"
#include "cuda/small/boxes.cuh"

namespace natten_jax::small {

/// A tile's rows as the first operand of products.
template <class Element, int kHeadDim>
struct RowOperand {
  using Product = sm80::HalfProduct<Element>;
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

  CUTE_DEVICE typename Product::A operator()(int step) const {
    if constexpr (kInRegisters) return a[step];
    typename Product::A result;
    const typename Product::template ReadA<Tile> read(buffer, 0);
    read(result, 0, step);
    return result;
  }
};

/// The operands of a warp's tiles.
template <class Element, int kHeadDim, int kTiles>
struct RowOperands {
  RowOperand<Element, kHeadDim> of[kTiles];

  CUTE_DEVICE explicit RowOperands(std::uint32_t buffer) {
    CUTE_UNROLL
    for (int t = 0; t < kTiles; ++t) of[t] = RowOperand<Element, kHeadDim>(buffer + t * RowTile<kHeadDim>::kBytes);
  }
};

/// What a warp computes at once, so that the instructions of one part run while others' wait for their results: two
/// tiles and a pair of groups, or one tile and two pairs, or one.
template <int kTile>
struct PairsOfTile {
  static constexpr int kParts = 2;
  static constexpr int tile(int) { return kTile; }
  static constexpr int pair(int part) { return part; }
};
struct TilesOfPair {
  static constexpr int kParts = 2;
  static constexpr int tile(int part) { return part; }
  static constexpr int pair(int) { return 0; }
};
struct PairOfTile {
  static constexpr int kParts = 1;
  static constexpr int tile(int) { return 0; }
  static constexpr int pair(int) { return 0; }
};

/// The accumulators of a pair of groups.
using PairLogits = float[2][4];

/// Where a lane reads a pair's columns.
struct PairPlace {
  std::uint32_t across[2], along[2];  // as in Lanes, of each array
  std::uint32_t offset;               // in a stage
};

/// Where a lane reads chunks 2 * step and 2 * step + 1 of a pair's columns.
CUTE_DEVICE std::uint32_t step_address(std::uint32_t address, int step) {
  return (address ^ (step % 4 * 32)) + step / 4 * 128;
}

/// Whether a part is the first one with its pair, or with its tile.
template <class Parts>
constexpr bool is_first_of_pair(int part) {
  return part == 0 || Parts::pair(part) != Parts::pair(0);
}
template <class Parts>
constexpr bool is_first_of_tile(int part) {
  return part == 0 || Parts::tile(part) != Parts::tile(0);
}

/// Products of tiles' rows with one array of pairs' columns, the first one or the second: `x[part]` starts as
/// `initial(part)`, four numbers for each group.
template <class Element, int kHeadDim, bool kIsSecond, class Parts, int kTiles, class Initial>
CUTE_DEVICE void multiply_columns(PairLogits (&x)[Parts::kParts], const RowOperands<Element, kHeadDim, kTiles>& rows,
                                  const PairPlace (&pairs)[2], const Initial& initial) {
  using Instruction = sm80::HalfInstruction<Element>;
  constexpr int kSteps = kHeadDim / 16;
  CUTE_UNROLL
  for (int step = 0; step < kSteps; ++step) {
    std::uint32_t r[Parts::kParts][4];
    typename sm80::HalfProduct<Element>::A a[Parts::kParts];
    CUTE_UNROLL
    for (int i = 0; i < Parts::kParts; ++i) {
      if (is_first_of_pair<Parts>(i)) sm80::load_matrices(r[i], step_address(pairs[i].across[kIsSecond], step));
      if (is_first_of_tile<Parts>(i)) a[i] = rows.of[Parts::tile(i)](step);
    }
    CUTE_UNROLL
    for (int h = 0; h < 2; ++h) {
      CUTE_UNROLL
      for (int i = 0; i < Parts::kParts; ++i) {
        float (&d)[4] = x[i][h];
        const float* c = step > 0 ? d : initial(i);
        const auto& of_rows = a[is_first_of_tile<Parts>(i) ? i : 0];
        const auto& b = r[is_first_of_pair<Parts>(i) ? i : 0];
        Instruction::fma(d[0], d[1], d[2], d[3], of_rows.r[0], of_rows.r[1], of_rows.r[2], of_rows.r[3], b[2 * h],
                         b[2 * h + 1], c[0], c[1], c[2], c[3]);
      }
    }
  }
}

/// The same, from zeros.
template <class Element, int kHeadDim, bool kIsSecond, class Parts, int kTiles>
CUTE_DEVICE void multiply_columns(PairLogits (&x)[Parts::kParts], const RowOperands<Element, kHeadDim, kTiles>& rows,
                                  const PairPlace (&pairs)[2]) {
  const float zeros[4] = {};
  multiply_columns<Element, kHeadDim, kIsSecond, Parts>(x, rows, pairs,
                                                        [&](int) { return zeros; });
}

/// o[tile] += weights[part] * one array of pairs' columns.
template <class Element, int kHeadDim, bool kIsSecond, class Parts, int kTiles>
CUTE_DEVICE void add_columns(float (&o)[kTiles][kHeadDim / 8][4], const std::uint32_t (&weights)[Parts::kParts][4],
                             const PairPlace (&pairs)[2]) {
  using Instruction = sm80::HalfInstruction<Element>;
  constexpr int kSteps = kHeadDim / 16;
  CUTE_UNROLL
  for (int i = 0; i < Parts::kParts; ++i) {
    if (!is_first_of_pair<Parts>(i)) continue;
    CUTE_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      std::uint32_t r[4];
      sm80::load_matrices_transposed(r, step_address(pairs[i].along[kIsSecond], step));
      CUTE_UNROLL
      for (int h = 0; h < 2; ++h) {
        CUTE_UNROLL
        for (int j = i; j < Parts::kParts; ++j) {
          if (Parts::pair(j) != Parts::pair(i)) continue;
          float (&c)[4] = o[Parts::tile(j)][2 * step + h];
          const auto& a = weights[j];
          Instruction::fma(c[0], c[1], c[2], c[3], a[0], a[1], a[2], a[3], r[2 * h], r[2 * h + 1], c[0], c[1], c[2],
                           c[3]);
        }
      }
    }
  }
}

/// What is added to an exponent, for the element of a group's four that a lane holds: nothing where it is seen, and
/// -2^127 where a mask's top bit says that it is not.
CUTE_DEVICE float hiding(std::uint32_t masks, int element) {
  // A selector's top bit replicates the sign of a byte, which __byte_perm cannot.
  std::uint32_t result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(masks), "r"(0), "r"(0x8444 + 0x1000 * element));
  return __uint_as_float(result);
}

/// Two elements of a lane's first row of a group, or of its second, that are hidden: ones in their halves.
CUTE_DEVICE std::uint32_t hidden_halves(std::uint32_t masks, int row) {
  std::uint32_t result;
  asm("prmt.b32 %0, %1, %1, %2;" : "=r"(result) : "r"(masks), "r"(row == 0 ? 0x9988 : 0xbbaa));
  return result;
}

/// A lane's byte of masks for a pair of groups as a word: the bits of the first group's four elements are the top ones
/// of its bytes, and those of the second group follow four bits below.
CUTE_DEVICE std::uint32_t spread_bits(std::uint32_t bits) {
  return bits * (1u | 1u << 9 | 1u << 18 | 1u << 27);
}

/// Where the lanes of a warp read the columns of a stage, of the window or additional ones.
template <class Columns>
struct StageLanes {
  std::uint32_t across[2], along[2];

  CUTE_DEVICE StageLanes(const Lanes& lanes, const Tables& tables, std::uint32_t stage) {
    across[0] = stage + lanes.across;
    along[0] = stage + lanes.along;
    across[1] = Columns::in_second(across[0], tables.second);
    along[1] = Columns::in_second(along[0], tables.second);
  }

  CUTE_DEVICE PairPlace at(std::uint32_t offset) const {
    return {{across[0] + offset, across[1] + offset}, {along[0] + offset, along[1] + offset}, offset};
  }
};

/// Calls `call(parts, pairs, masks)` for each entry of a warp's tiles: what it computes at once, where that lies in a
/// stage, and which elements of each part are hidden, as `hiding` and `hidden_halves` take it for the first group and,
/// four bits higher, for the second.
template <class Columns, int kTiles, class Call>
CUTE_DEVICE void for_entries(const TilePlan& tile, const Tables& tables, int additional_pairs, std::uint32_t stage,
                             const Call& call) {
  const auto go = [&](auto parts, const Lanes& of_lanes, int first, int entries) {
    const StageLanes<Columns> lanes(of_lanes, tables, stage);
    const uint2* offset = tables.offsets + first;
    const std::uint16_t* bits = tables.masks + 32 * first;
    // What the next entry needs is read while this one is computed, after the last one what nobody looks at.
    uint2 at = *offset;
    std::uint32_t masks = *bits;
    CUTE_NO_UNROLL
    for (int i = 0; i < entries; ++i) {
      const PairPlace pairs[2] = {lanes.at(at.x), lanes.at(at.y)};
      const std::uint32_t spread[2] = {spread_bits(masks & 0xff), spread_bits(masks >> 8)};
      at = *++offset;
      masks = *(bits += 32);
      call(parts, pairs, spread);
    }
  };
  const auto go_single = [&](const Lanes& lanes, int first, int entries, bool is_odd) {
    go(PairsOfTile<0>{}, lanes, first, entries - is_odd);
    if (is_odd) go(PairOfTile{}, lanes, first + entries - 1, 1);
  };
  const int additional = tile.all_entries();
  if constexpr (kTiles > 1) {
    go(PairsOfTile<0>{}, tile.lanes, 0, tile.entries[kFirst]);
    go(TilesOfPair{}, tile.lanes, tile.entries[kFirst], tile.entries[kBoth]);
    go(PairsOfTile<1>{}, tile.lanes, tile.entries[kFirst] + tile.entries[kBoth], tile.entries[kSecond]);
    if (additional_pairs > 0) go(TilesOfPair{}, tile.lanes_additional, additional, additional_pairs);
  } else {
    go_single(tile.lanes, 0, tile.entries[kFirst], tile.is_odd);
    if (additional_pairs > 0) {
      go_single(tile.lanes_additional, additional, (additional_pairs + 1) / 2, additional_pairs % 2 != 0);
    }
  }
}

/// Calls `call(pair, masks)` for each pair of groups of one of a warp's tiles: the slow way, for what is rare.
template <class Columns, int kTiles, class Call>
CUTE_DEVICE void for_pairs_of(int t, const TilePlan& tile, const Tables& tables, int additional_pairs,
                              std::uint32_t stage, const Call& call) {
  const auto go = [&](const Lanes& of_lanes, int first, int parts, int step, int begin) {
    const StageLanes<Columns> lanes(of_lanes, tables, stage);
    CUTE_NO_UNROLL
    for (int i = begin; i < parts; i += step) {
      const uint2 at = tables.offsets[first + i / 2];
      const std::uint32_t masks = tables.masks[32 * (first + i / 2)];
      call(lanes.at(i % 2 == 0 ? at.x : at.y), spread_bits(i % 2 == 0 ? masks & 0xff : masks >> 8));
    }
  };
  const int additional = tile.all_entries();
  if constexpr (kTiles > 1) {
    if (t == 0) go(tile.lanes, 0, 2 * tile.entries[kFirst], 1, 0);
    // Of an entry of both tiles, the offset stands twice.
    go(tile.lanes, tile.entries[kFirst], 2 * tile.entries[kBoth], 2, t);
    if (t == 1) go(tile.lanes, tile.entries[kFirst] + tile.entries[kBoth], 2 * tile.entries[kSecond], 1, 0);
    if (additional_pairs > 0) go(tile.lanes_additional, additional, 2 * additional_pairs, 2, t);
  } else {
    go(tile.lanes, 0, 2 * tile.entries[kFirst] - tile.is_odd, 1, 0);
    if (additional_pairs > 0) go(tile.lanes_additional, additional, additional_pairs, 1, 0);
  }
}

}  // namespace natten_jax::small
