// Forward neighborhood attention for small windows: a warp owns 16 queries, a CTA a region of them, whose keys and
// values it loads once for each batch entry and head.
//
// Weights are relative to no logit at all (bfloat16), or to one in the middle of the window (float16), so that nothing
// is rescaled. Where the sum of a row's weights then comes out so large or so small that digits may have been lost, its
// tile is computed once more, relative to the largest logits.
#pragma once

#include <cmath>

#include "cuda/common/arithmetic.cuh"
#include "cuda/small/products.cuh"
#include "natten_jax/logsumexp.h"

namespace natten_jax::small {

/// Between which sums of weights none of them has lost digits, given what an element type can hold.
template <class Element>
struct TrustedSums {
  static constexpr bool kHasReference = false;
  static constexpr float kLeast = 0x1p-60f, kMost = 0x1p60f;
};
template <>
struct TrustedSums<cutlass::half_t> {
  static constexpr bool kHasReference = true;
  static constexpr float kLeast = 0x1p-6f, kMost = 0x1p15f;
};

/// The results of a warp's tiles: sums of weighted values, and of weights, of the lane's columns until they are
/// finished; what the weights of a lane's two rows of each tile are relative to.
template <int kHeadDim, int kTiles>
struct TileOutputs {
  float o[kTiles][kHeadDim / 8][4] = {};
  float sum[kTiles][2] = {};
  float shift[kTiles][2] = {};

  CUTE_DEVICE float row_sum(int t, int r) const {
    float result = sum[t][r];
    result += __shfl_xor_sync(0xffffffffu, result, 1);
    return result + __shfl_xor_sync(0xffffffffu, result, 2);
  }
};

/// Adds pairs of groups, given their weights.
template <class Element, int kHeadDim, class Parts, int kTiles>
CUTE_DEVICE void add_pairs(TileOutputs<kHeadDim, kTiles>& result, const PairLogits (&weights)[Parts::kParts],
                           const PairPlace (&pairs)[2]) {
  std::uint32_t a[Parts::kParts][4];
  CUTE_UNROLL
  for (int i = 0; i < 4; ++i) {
    CUTE_UNROLL
    for (int part = 0; part < Parts::kParts; ++part) {
      const float low = weights[part][i / 2][i % 2 * 2], high = weights[part][i / 2][i % 2 * 2 + 1];
      a[part][i] = pack<Element>(low, high);
      result.sum[Parts::tile(part)][i % 2] += low + high;
    }
  }
  add_columns<Element, kHeadDim, true, Parts>(result.o, a, pairs);
}

/// log2(x) to about 2^-22; -infinity of zero.
CUTE_DEVICE float log2_approximately(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// The largest of a row's numbers in the four lanes that share it.
CUTE_DEVICE float largest_of_row(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

/// A tile's results relative to the largest logits, whatever these are.
template <class Element, int kHeadDim, class Columns, int kTile, int kTiles>
CUTE_DEVICE void compute_exactly(TileOutputs<kHeadDim, kTiles>& result,
                                 const RowOperands<Element, kHeadDim, kTiles>& queries, const TilePlan& tile,
                                 const Tables& tables, int additional_pairs, std::uint32_t stage, float factor) {
  struct Part : PairOfTile {
    static constexpr int tile(int) { return kTile; }
  };
  float largest[2] = {-INFINITY, -INFINITY};
  const auto for_pairs = [&](const auto& call) {
    for_pairs_of<Columns, kTiles>(kTile, tile, tables, additional_pairs, stage,
                                  [&](const PairPlace& pair, std::uint32_t masks) {
                                    const PairPlace pairs[2] = {pair, {}};
                                    PairLogits x[1];
                                    multiply_columns<Element, kHeadDim, false, Part>(x, queries, pairs);
                                    call(x, pairs, masks);
                                  });
  };
  for_pairs([&](PairLogits(&x)[1], const PairPlace(&)[2], std::uint32_t masks) {
    CUTE_UNROLL
    for (int i = 0; i < 8; ++i) {
      const int e = i % 4;
      if (hiding(masks << (i / 4 * 4), e) == 0.f) largest[e / 2] = fmaxf(largest[e / 2], x[0][i / 4][e]);
    }
  });
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    largest[r] = largest_of_row(largest[r]);
    if (largest[r] == -INFINITY) largest[r] = 0.f;
    result.shift[kTile][r] = largest[r];
    result.sum[kTile][r] = 0.f;
  }
  CUTE_UNROLL
  for (int i = 0; i < kHeadDim / 2; ++i) result.o[kTile][i / 4][i % 4] = 0.f;
  for_pairs([&](PairLogits(&x)[1], const PairPlace(&pairs)[2], std::uint32_t masks) {
    CUTE_UNROLL
    for (int i = 0; i < 8; ++i) {
      float& each = x[0][i / 4][i % 4];
      // Not by a sum with something large: what is hidden may be infinite, or no number at all.
      const bool is_hidden = hiding(masks << (i / 4 * 4), i % 4) != 0.f;
      each = is_hidden ? 0.f : fast_exp2((each - largest[i % 4 / 2]) * factor);
    }
    add_pairs<Element, kHeadDim, Part>(result, x, pairs);
  });
}

/// What the weights of a tile's rows are relative to: the largest logit of a pair in the middle of its window.
template <class Element, int kHeadDim, int kTile, int kTiles>
CUTE_DEVICE void find_reference(float (&shift)[2], const RowOperands<Element, kHeadDim, kTiles>& queries,
                                const TilePlan& tile, const Tables& tables, std::uint32_t stage) {
  struct Part : PairOfTile {
    static constexpr int tile(int) { return kTile; }
  };
  int first = 0, entries = tile.entries[kFirst];
  if (kTiles > 1 && tile.entries[kBoth] > 0) {
    first = entries;
    entries = tile.entries[kBoth];
  } else if (kTile > 0) {
    first = entries;
    entries = tile.entries[kSecond];
  }
  if (entries == 0) return;
  const std::uint32_t middle = tables.offsets[first + entries / 2].x;
  const PairPlace pairs[2] = {{{stage + tile.lanes.across + middle}, {}, middle}, {}};
  PairLogits x[1];
  multiply_columns<Element, kHeadDim, false, Part>(x, queries, pairs);
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    shift[r] = largest_of_row(
        fmaxf(fmaxf(x[0][0][2 * r], x[0][0][2 * r + 1]), fmaxf(x[0][1][2 * r], x[0][1][2 * r + 1])));
  }
}

template <int... kNumbers, class Call>
CUTE_DEVICE void for_tiles(std::integer_sequence<int, kNumbers...>, const Call& call) {
  (call(std::integral_constant<int, kNumbers>{}), ...);
}

template <class Element, int kHeadDim, bool kHasBoxes, int kTiles>
CUTE_DEVICE void attend(const ForwardParams& p) {
  using Sums = TrustedSums<Element>;
  using Rows = RowTile<kHeadDim>;
  using Columns = ColumnRows<kHeadDim, kHasBoxes>;
  extern __shared__ __align__(1024) char raw[];
  Tables tables;
  TilePlan tile;
  Loads<kHeadDim, false, kHasBoxes> loads(p, raw);
  if (!make_plan<kHeadDim, false, kHasBoxes, kTiles>(p, raw, tables, tile, loads)) return;

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, additional_pairs = (p.additional_kv + 15) / 16;
  const std::uint32_t staging = kHasBoxes ? p.region.warps * kTiles * Rows::kBytes : 0;
  const float factor = p.scale * kLog2E;

  const auto load_rows = [&](const Item& item, std::uint32_t rows) {
    Rows::template copy<kTiles>(tables.row_tokens, row_of(p.query, item.of_query, p.head_dim), p.heads, p.head_dim,
                                rows);
  };
  const ColumnCopy<kHeadDim> copy(p.heads_kv, p.head_dim, p.head_dim_v);
  const auto load_columns = [&](const Item& item, std::uint32_t stage) {
    const int of_key = item.of_key(p);
    copy.box(tables, copy.source(row_of(p.key, of_key, p.head_dim), row_of(p.value, of_key, p.head_dim_v)), stage);
    if (p.additional_kv > 0) {
      const int of_additional = item.of_additional(p);
      copy.sequence(p.additional_kv,
                    copy.source(row_of(p.additional_keys, of_additional, p.head_dim),
                                row_of(p.additional_values, of_additional, p.head_dim_v)),
                    stage + p.region.shared.additional);
    }
  };
  const auto compute = [&](const Item& item, std::uint32_t stage, std::uint32_t rows, const auto& phases) {
    if (!tile.has_rows) return;
    const RowOperands<Element, kHeadDim, kTiles> queries(rows);
    phases.rows_are_read();
    TileOutputs<kHeadDim, kTiles> result;
    constexpr std::make_integer_sequence<int, kTiles> kAll{};
    if constexpr (Sums::kHasReference) {
      for_tiles(kAll, [&](auto t) {
        find_reference<Element, kHeadDim, t>(result.shift[t], queries, tile, tables, stage);
      });
    }
    for_entries<Columns, kTiles>(
        tile, tables, additional_pairs, stage,
        [&](auto parts, const PairPlace(&pairs)[2], const std::uint32_t(&masks)[2]) {
          using Parts = decltype(parts);
          PairLogits x[Parts::kParts];
          multiply_columns<Element, kHeadDim, false, Parts>(x, queries, pairs);
          CUTE_UNROLL
          for (int i = 0; i < 8; ++i) {
            CUTE_UNROLL
            for (int part = 0; part < Parts::kParts; ++part) {
              float& each = x[part][i / 4][i % 4];
              if constexpr (Sums::kHasReference) each -= result.shift[Parts::tile(part)][i % 4 / 2];
              each = fast_exp2(fmaf(each, factor, hiding(masks[part] << (i / 4 * 4), i % 4)));
            }
          }
          add_pairs<Element, kHeadDim, Parts>(result, x, pairs);
        });
    int tokens[kTiles][2];
    float sums[kTiles][2];
    for_tiles(kAll, [&](auto t) {
      bool is_trusted = true;
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        tokens[t][r] = tables.row_tokens[kRows * t + lane / 4 + 8 * r];
        sums[t][r] = result.row_sum(t, r);
        is_trusted &= tokens[t][r] < 0 || (sums[t][r] >= Sums::kLeast && sums[t][r] <= Sums::kMost);
      }
      if (__any_sync(0xffffffffu, !is_trusted)) {
        compute_exactly<Element, kHeadDim, Columns, t>(result, queries, tile, tables, additional_pairs, stage, factor);
        CUTE_UNROLL
        for (int r = 0; r < 2; ++r) sums[t][r] = result.row_sum(t, r);
      }
    });
    phases.columns_are_read();
    // One lane writes what is known of its first row, its neighbor what is known of the second.
    const bool is_second = lane % 2 != 0;
    const auto normalisation = [](float sum) { return sum == 0.f ? 0.f : fast_reciprocal(sum); };
    for_tiles(kAll, [&](auto t) {
      const int token = is_second ? tokens[t][1] : tokens[t][0];
      if (lane % 4 < 2 && token >= 0) {
        const float sum = is_second ? sums[t][1] : sums[t][0],
                    shift = is_second ? result.shift[t][1] : result.shift[t][0], log2_sum = log2_approximately(sum);
        const float logsumexp = sum == 0.f ? -INFINITY : fmaf(__fmul_rn(shift, factor), kLn2, log2_sum * kLn2);
        const int at = item.of_query + token * p.heads;
        p.logsumexp[at] = logsumexp;
        if (p.remainder != nullptr) {
          p.remainder[at] = sum == 0.f ? 0.f : logsumexp_remainder(logsumexp, shift, factor, log2_sum);
        }
      }
      Rows::template store<Element>(result.o[t], normalisation(sums[t][0]), normalisation(sums[t][1]),
                                    tables.row_tokens + kRows * t, row_of(p.out, item.of_query, p.head_dim_v), p.heads,
                                    p.head_dim_v, rows + staging + t * Rows::kBytes);
    });
  };
  loads.for_items(tables, tile, warp * kTiles * Rows::kBytes, load_rows, load_columns, compute);
}

template <class Element, int kHeadDim, bool kHasBoxes, int kTiles>
__global__ void __launch_bounds__(32 * resident_warps(Kernel::kForward, kHeadDim, kTiles))
    natten_jax_small_forward(const __grid_constant__ ForwardParams p) {
  if constexpr (is_compiled(kHasBoxes)) attend<Element, kHeadDim, kHasBoxes, kTiles>(p);
}

}  // namespace natten_jax::small
