// Forward neighborhood attention for small windows: a warp owns 16 queries. A CTA owns a region of queries. Once per
// batch entry and head, it loads the keys and values that these queries see.
//
// Softmax weights are computed relative to a fixed reference logit, so that sums are never rescaled. The reference is 0
// in bfloat16. In float16, it is a logit in the middle of the window. If a row's sum of weights is so large, so small
// or so close to 1 that digits may have been lost, its tile is recomputed relative to the largest logit of each row.
#pragma once

#include <cmath>

#include "cuda/common/row_sums.cuh"
#include "cuda/small/cta_plans.cuh"
#include "cuda/small/head_terms.cuh"
#include "cuda/small/key_bias.cuh"
#include "cuda/small/products.cuh"
#include "cuda/small/seams.cuh"
#include "cuda/small/trusted_sums.cuh"
#include "natten_jax/added_logit.h"
#include "natten_jax/merge.h"

namespace natten_jax::small {

/// Accumulators of a lane: sums of weighted values, and for each of its two rows the lane's partial sum of weights and
/// the row's reference logit (`shift`).
template <int kHeadDim>
struct TileOutput {
  float o[kHeadDim / 8][4] = {};
  float sum[2] = {};
  float shift[2] = {};
};

/// Accumulates the weights of pairs of groups, and the values multiplied by them.
template <class Element, int kHeadDim, int kPairs>
CUTE_DEVICE void add_pairs(TileOutput<kHeadDim>& result, const PairLogits (&weights)[kPairs],
                           const Pairs<kPairs>& pairs) {
  std::uint32_t a[kPairs][4];
  CUTE_UNROLL
  for (int pair = 0; pair < kPairs; ++pair) {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      const float low = weights[pair][i / 2][i % 2 * 2], high = weights[pair][i / 2][i % 2 * 2 + 1];
      a[pair][i] = pack<Element>(low, high);
      result.sum[i % 2] += low + high;
    }
  }
  add_columns<Element, kHeadDim, kSecondArray>(result.o, a, pairs);
}

/// Recomputes a tile's sums with weights relative to the largest logit of each row.
template <class Element, int kHeadDim, class Columns, Feature kFeature, class Queries>
CUTE_DEVICE void compute_exactly(TileOutput<kHeadDim>& result, const Queries& queries, const TilePlan& tile,
                                 const Tables& tables, int additional_pairs, std::uint32_t stage, float factor) {
  float largest[2] = {-INFINITY, -INFINITY};
  const auto for_logits = [&](const auto& call) {
    for_pairs<Columns, 1, Owner::kQueries, kFeature>(tile, tables, additional_pairs, stage, [&](const Pairs<1>& pair) {
      PairLogits x[1];
      multiply_keys<Element, kHeadDim, Owner::kQueries, kFeature>(x, queries, tile, stage, pair);
      call(x, pair);
    });
  };
  for_logits([&](const PairLogits(&x)[1], const Pairs<1>& pair) {
    CUTE_UNROLL
    for (int i = 0; i < 8; ++i) {
      const int e = i % 4;
      if (additive_mask(masks_of_group(pair.masks[0], i / 4), e) == 0.f)
        largest[e / 2] = fmaxf(largest[e / 2], x[0][i / 4][e]);
    }
  });
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    largest[r] = largest_of_row(largest[r]);
    if (largest[r] == -INFINITY) largest[r] = 0.f;
  }
  result = {};
  for_logits([&](PairLogits(&x)[1], const Pairs<1>& pair) {
    CUTE_UNROLL
    for (int i = 0; i < 8; ++i) {
      float& logit = x[0][i / 4][i % 4];
      // Select zero, instead of adding a large negative number to the exponent: logits of hidden (masked out) keys may
      // be infinite or NaN.
      const bool is_hidden = additive_mask(masks_of_group(pair.masks[0], i / 4), i % 4) != 0.f;
      logit = is_hidden ? 0.f : fast_exp2((logit - largest[i % 4 / 2]) * factor);
    }
    add_pairs<Element, kHeadDim>(result, x, pair);
  });
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) result.shift[r] = largest[r];
}

template <class Element, int kHeadDim, bool kHasBoxes, Terms kTerms, Feature kFeature, class Items>
CUTE_DEVICE void attend(const ForwardParams& p) {
  constexpr bool kHasTerms = kTerms == Terms::kPerHead, kHasBias = kFeature == Feature::kRelativeBias,
                 kHasKeyBias = kFeature == Feature::kKeyBias;
  using Sums = TrustedSums<Element>;
  using Rows = RowTile<kHeadDim>;
  using Columns = ColumnRows<kHeadDim, kHasBoxes>;
  extern __shared__ __align__(1024) char raw[];
  Tables tables;
  TilePlan tile;
  using FormLoads = Loads<kHeadDim, Kernel::kForward, kHasBoxes, Items, kHasBias>;
  FormLoads loads(p, raw);
  const HeadDims<kHeadDim, kHasBoxes> head_dims(p);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, additional_pairs = kHasBoxes ? 0 : p.additional_pairs();
  const std::uint32_t staging = FormLoads::kHasResultsInRows ? 0 : p.region.warps * Rows::kBytes;

  const auto load_rows = [&](const Item& item, std::uint32_t rows) {
    Rows::copy(tables.row_indices, row_of(p.query, item.query_row, head_dims.key), head_dims.key, rows);
  };
  const ColumnCopies<kHeadDim, kHasBoxes> copy(p.heads_kv, p.head_dim, p.head_dim_v);
  const auto load_columns = [&](const Item& item, std::uint32_t stage) {
    copy.keys(p, tables, item, stage);
    if constexpr (kHasBias) copy_table(p, item, stage);
  };
  const auto compute = [&](const Item& item, std::uint32_t stage, std::uint32_t rows, const auto& phases,
                           auto& key_bias, auto& terms) {
    if (!tile.has_rows) return;
    terms.next(item);
    const float factor = terms.exponent_scale();
    const RowOperand<Element, kHeadDim> queries(rows);
    key_bias.prepare(item);
    phases.rows_are_read();
    TileOutput<kHeadDim> result;
    if constexpr (kHasTerms && !Sums::kHasReference) {
      // A sink is an additional weight. All lanes must call sink(), because it shuffles: if some lanes skipped the
      // call, the warp would deadlock.
      const float sink_weight = fast_exp2(terms.sink() * kLog2E);
      result.sum[0] = result.sum[1] = lane % 4 == 0 ? sink_weight : 0.f;
    }
    if constexpr (Sums::kHasReference) {
      if (tile.pairs > 0) {
        PairLogits x[1];
        const int middle = tile.pairs / 2;
        const std::uint32_t at = tables.offsets[middle], entries = kHasKeyBias
                                                                       ? tables.key_bias + middle * kKeyBiasBytes
                                                                   : kHasBias ? tables.entries[middle]
                                                                              : 0;
        const Pairs<1> pair{{{{stage + tile.lanes.across + at}, {}, at, entries}}, {}};
        multiply_keys<Element, kHeadDim, Owner::kQueries, kFeature>(x, queries, tile, stage, pair);
        CUTE_UNROLL
        for (int r = 0; r < 2; ++r) {
          result.shift[r] = largest_of_row(
              fmaxf(fmaxf(x[0][0][2 * r], x[0][0][2 * r + 1]), fmaxf(x[0][1][2 * r], x[0][1][2 * r + 1])));
          // A bias may hide all keys of the pair.
          if ((kHasBias || kHasKeyBias) && result.shift[r] == -INFINITY) result.shift[r] = 0.f;
        }
      }
    }
    for_pairs<Columns, 2, Owner::kQueries, kFeature>(tile, tables, additional_pairs, stage, [&](const auto& pairs) {
      constexpr int kPairs = std::decay_t<decltype(pairs)>::kCount;
      PairLogits x[kPairs];
      multiply_keys<Element, kHeadDim, Owner::kQueries, kFeature>(x, queries, tile, stage, pairs);
      CUTE_UNROLL
      for (int i = 0; i < 8 * kPairs; ++i) {
        const int pair = i / 8, group = i / 4 % 2, e = i % 4;
        float& logit = x[pair][group][e];
        if constexpr (Sums::kHasReference) logit -= result.shift[e / 2];
        logit = fast_exp2(fmaf(logit, factor, additive_mask(masks_of_group(pairs.masks[pair], group), e)));
      }
      add_pairs<Element, kHeadDim>(result, x, pairs);
    });
    const int2 indices = tables.row_indices[lane / 4];
    float sums[2] = {sum_of_row(result.sum[0]), sum_of_row(result.sum[1])};
    bool is_trusted = true;
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int is_sum = is_sum_trusted<Element>(sums[r], result.shift[r], factor);
      is_trusted &= (is_sum | static_cast<int>((r == 0 ? indices.x : indices.y) < 0)) != 0;
    }
    // Sink that still has to be added to the sums; -infinity if they include it. In float16, the sink is added after
    // the check above, because sums that include it would hide a loss of digits in the weights.
    float sink = -INFINITY;
    if constexpr (kHasTerms && Sums::kHasReference) sink = terms.sink();
    if (__any_sync(0xffffffffu, !is_trusted)) {
      compute_exactly<Element, kHeadDim, Columns, kFeature>(result, queries, tile, tables, additional_pairs, stage,
                                                            factor);
      sums[0] = sum_of_row(result.sum[0]);
      sums[1] = sum_of_row(result.sum[1]);
      if constexpr (kHasTerms) sink = terms.sink();
    }
    phases.columns_are_read();
    key_bias.release(item);
    // Four lanes share two rows. The first of these lanes writes the logsumexp of the first row, and the second lane
    // writes the logsumexp of the second row.
    const bool is_second = lane % 2 != 0;
    const int index = is_second ? indices.y : indices.x;
    bool has_sink = sink != -INFINITY;
    if (Sums::kHasReference && has_sink && add_sink_to_sums(sums, result.shift, sink, factor, {indices.x, indices.y})) {
      has_sink = false;
    }
    float row_factors[2] = {normalisation(sums[0]), normalisation(sums[1])};
    Logsumexp logsumexp =
        logsumexp_of_sum(is_second ? sums[1] : sums[0], is_second ? result.shift[1] : result.shift[0], factor);
    if (has_sink) {
      const float share_of_keys = add_sink(logsumexp, added_logit(sink));
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) row_factors[r] *= __shfl_sync(0xffffffffu, share_of_keys, r, 4);
    }
    if (lane % 4 < 2 && index >= 0) {
      const int at = item.query_row + index;
      p.logsumexp[at] = logsumexp.value;
      if (p.remainder != nullptr) p.remainder[at] = pack_remainder(logsumexp.remainder);
    }
    Rows::template store<Element>(result.o, row_factors[0], row_factors[1], tables.row_indices,
                                  row_of(p.out, item.query_row, head_dims.value), head_dims.value, rows + staging);
    phases.results_are_written();
  };
  for_plans<Items, Owner::kQueries>(p, raw, [&](const Items& items, const EntryLayout& layout, bool is_first) {
    loads.take(items, is_first);
    HeadTerms<kHasTerms, kHasBoxes && !Items::kPerEntry && !Items::kMayWrap, Items> terms(
        p, items);  // its loads overlap with make_plan
    const auto load_first_rows = [&] { loads.load_first_rows(items.at(p, 0), warp * Rows::kBytes, load_rows); };
    if (!make_plan<kHeadDim, Owner::kQueries, kHasBoxes, kFeature>(p, raw, tables, tile, loads, load_first_rows,
                                                                   layout)) {
      return;
    }
    ColumnKeyBias<kHasKeyBias> key_bias(p, tables, tile, items.at(p, 0));
    loads.for_items(tables, tile, warp * Rows::kBytes, load_rows, load_columns,
                    [&](const Item& item, std::uint32_t stage, std::uint32_t rows, const auto& phases) {
                      compute(item, stage, rows, phases, key_bias, terms);
                    });
  });
}

template <class Element, int kHeadDim, bool kHasBoxes, Terms kTerms, Feature kFeature, class Items>
__global__ void __launch_bounds__(32 * resident_warps(Kernel::kForward, kHeadDim))
    natten_jax_small_forward(const __grid_constant__ ForwardParams p) {
  if constexpr (is_compiled(kHasBoxes)) {
    attend<Element, kHeadDim, kHasBoxes, kTerms, kFeature, Items>(p);
  }
}

}  // namespace natten_jax::small
