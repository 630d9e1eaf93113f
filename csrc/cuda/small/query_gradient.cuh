// Query gradients for small windows: as in the forward pass, a warp owns 16 queries. The kernel also computes the
// statistics of queries for the kernel of key and value gradients.
#pragma once

#include <cmath>

#include "cuda/common/arithmetic.cuh"
#include "cuda/small/bias_results.h"
#include "cuda/small/bias_sums.cuh"
#include "cuda/small/cta_plans.cuh"
#include "cuda/small/key_bias.cuh"
#include "cuda/small/products.cuh"
#include "cuda/small/seams.cuh"
#include "cuda/small/sinks_parts.cuh"
#include "natten_jax/logsumexp.h"

namespace natten_jax::small {

/// For each of a lane's two rows, computes the dot product of this row of a and this row of b. Four lanes share a row,
/// and get the same result. `result` has each product twice, in accumulator order.
template <class Element, int kHeadDim>
CUTE_DEVICE void multiply_rows(float (&result)[4], const RowOperand<Element, kHeadDim>& a,
                               const RowOperand<Element, kHeadDim>& b) {
  using Instruction = HalfInstruction<Element>;
  // Multiply all rows of a by rows 0 to 7 of b, then by rows 8 to 15, with MMA, and use only the diagonals. This takes
  // 8 instructions. To multiply and add each lane's elements would take 70.
  float x[2][4] = {};
  CUTE_UNROLL
  for (int step = 0; step < kHeadDim / 16; ++step) {
    const auto a_fragment = a(step), b_fragment = b(step);
    CUTE_UNROLL
    for (int h = 0; h < 2; ++h) {
      float (&d)[4] = x[h];
      Instruction::fma(d[0], d[1], d[2], d[3], a_fragment.r[0], a_fragment.r[1], a_fragment.r[2], a_fragment.r[3],
                       b_fragment.r[h], b_fragment.r[2 + h], d[0], d[1], d[2], d[3]);
    }
  }
  // Four lanes share a row of the product. `source` is the lane that holds the row's diagonal element.
  const int lane = threadIdx.x % 32, source = lane / 4 * 4 + lane / 8;
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    const float diagonal = lane / 4 % 2 == 0 ? x[r][2 * r] : x[r][2 * r + 1];
    // Both shuffles return the same value. The compiler treats the results as different values, and keeps them in
    // adjacent registers, as MMA requires. With one shuffle, it would copy the value to adjacent registers for each
    // group.
    result[2 * r] = __shfl_sync(0xffffffffu, diagonal, source);
    result[2 * r + 1] = __shfl_sync(0xffffffffu, diagonal, source + 32);
  }
}

/// Statistics of a lane's two rows that the gradients need in addition to the operands.
template <class Element>
struct RowStatistics {
  int at[2];  // indices in arrays with a number per query and head; negative if the row is outside of the layout
  float logsumexp[2] = {}, remainder[2] = {}, logsumexp_cotangent[2] = {};
  float delta[4] = {};  // each row twice, in accumulator order
  bool is_large[2] = {};

  /// Starts to load the logsumexps and their cotangents. These loads have the longest latency, so `compute` starts them
  /// first.
  CUTE_DEVICE RowStatistics(const BackwardParams& p, const Item& item, const int2* row_indices) {
    const int2 indices = row_indices[threadIdx.x % 32 / 4];
    const bool has_cotangent = p.logsumexp_cotangent != nullptr;
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int index = r == 0 ? indices.x : indices.y;
      at[r] = index < 0 ? -1 : item.query_row + index;
      if (index >= 0) logsumexp[r] = p.logsumexp[at[r]];
      if (index >= 0 && has_cotangent) logsumexp_cotangent[r] = p.logsumexp_cotangent[at[r]];
    }
  }

  template <int kHeadDim>
  CUTE_DEVICE void find_delta(const RowOperand<Element, kHeadDim>& cotangents,
                              const RowOperand<Element, kHeadDim>& outs) {
    multiply_rows(delta, cotangents, outs);
  }

  /// Completes the statistics. For each row, a single lane of the four that share the row calls `write(r, numbers)`.
  /// `numbers` are the statistics that key and value gradients need.
  template <Feature kFeature, class Write>
  CUTE_DEVICE void finish(const BackwardParams& p, const Write& write) {
    constexpr bool kHasBias = kFeature == Feature::kRelativeBias || kFeature == Feature::kKeyBias;
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      logsumexp[r] = base2_logsumexp(logsumexp[r]);
      // If a bias hides all keys in a query's window, the logsumexp is -infinity. Infinity instead makes all weights
      // zero.
      if (kHasBias && logsumexp[r] == -INFINITY) logsumexp[r] = INFINITY;
      delta[2 * r] -= logsumexp_cotangent[r];
      delta[2 * r + 1] -= logsumexp_cotangent[r];
      is_large[r] = has_remainder<Element>(logsumexp[r]);
      if (is_large[r] && p.remainder != nullptr) remainder[r] = p.remainder[at[r]];
      if (threadIdx.x % 4 == 0 && at[r] >= 0) {
        write(r, make_float4(is_large[r] ? NAN : logsumexp[r], delta[2 * r], logsumexp[r], remainder[r]));
      }
    }
  }
};

/// Accumulates a tile's unscaled query gradients. With a relative bias, also stores the logit gradients, from which the
/// gradient of the bias is computed. `sums` is the shared memory address to which the offsets TilePlan::sums are added.
template <class Columns, Feature kFeature, class Element, int kHeadDim>
CUTE_DEVICE void add_query_gradient(float (&gradient)[kHeadDim / 8][4], const RowStatistics<Element>& rows,
                                    const RowOperand<Element, kHeadDim>& queries,
                                    const RowOperand<Element, kHeadDim>& cotangents, float factor, const TilePlan& tile,
                                    const Tables& tables, int additional_pairs, std::uint32_t stage,
                                    std::uint32_t sums) {
  const float initial[4] = {-rows.delta[0], -rows.delta[1], -rows.delta[2], -rows.delta[3]};
  const auto differentiate = [&](auto weight) {
    for_pairs<Columns, 2, Owner::kQueries, kFeature>(tile, tables, additional_pairs, stage, [&](const auto& pairs) {
      constexpr int kPairs = std::decay_t<decltype(pairs)>::kCount;
      PairLogits x[kPairs], y[kPairs];
      multiply_keys<Element, kHeadDim, Owner::kQueries, kFeature>(x, queries, tile, stage, pairs);
      multiply_columns<Element, kHeadDim, kSecondArray>(y, cotangents, pairs, initial);
      std::uint32_t a[kPairs][4];
      CUTE_UNROLL
      for (int i = 0; i < 4 * kPairs; ++i) {
        const int pair = i / 4, h = i / 2 % 2, r = i % 2;
        const float *row_x = &x[pair][h][2 * r], *row_y = &y[pair][h][2 * r];
        a[pair][i % 4] = pack<Element>(weight(row_x[0], r) * row_y[0], weight(row_x[1], r) * row_y[1]) &
                         ~hidden_halves(masks_of_group(pairs.masks[pair], h), r);
      }
      if constexpr (kFeature == Feature::kRelativeBias) store_logit_gradients(tile, sums, a, pairs);
      add_columns<Element, kHeadDim, kFirstArray>(gradient, a, pairs);
    });
  };
  if (__any_sync(0xffffffffu, rows.is_large[0] || rows.is_large[1])) {
    differentiate([&](float x, int r) { return weight_of_large(x, factor, rows.logsumexp[r], rows.remainder[r]); });
  } else {
    differentiate([&](float x, int r) { return fast_exp2(fmaf(x, factor, -rows.logsumexp[r])); });
  }
}

template <class Element, int kHeadDim, bool kHasBoxes, Feature kFeature, class Items>
CUTE_DEVICE void differentiate_queries(const BackwardParams& p) {
  constexpr bool kHasBias = kFeature == Feature::kRelativeBias, kHasKeyBias = kFeature == Feature::kKeyBias;
  using Rows = RowTile<kHeadDim>;
  using Operand = RowOperand<Element, kHeadDim>;
  extern __shared__ __align__(1024) char raw[];
  if constexpr (!Items::kPerEntry) allow_next_kernel();  // the next kernel computes its plans while this kernel runs
  Tables tables;
  TilePlan tile;
  Loads<kHeadDim, Kernel::kQueryGradient, kHasBoxes, Items, kHasBias> loads(p, raw);
  const int warp = threadIdx.x / 32, additional_pairs = kHasBoxes ? 0 : p.additional_pairs();
  const HeadDims<kHeadDim, kHasBoxes> head_dims(p);
  const std::uint32_t buffer = p.region.warps * Rows::kBytes, staging = kHasBoxes ? 3 * buffer : 0;

  const auto load_rows = [&](const Item& item, std::uint32_t rows) {
    const auto copy_rows = [&](const void* array, int width, int number) {
      Rows::copy(tables.row_indices, row_of(array, item.query_row, width), width, rows + number * buffer);
    };
    copy_rows(p.query, head_dims.key, 0);
    copy_rows(p.out_cotangent, head_dims.value, 1);
    copy_rows(p.out, head_dims.value, 2);
  };
  const ColumnCopies<kHeadDim, kHasBoxes> copy(p.heads_kv, p.head_dim, p.head_dim_v);
  const auto load_columns = [&](const Item& item, std::uint32_t stage) {
    copy.keys(p, tables, item, stage);
    if constexpr (kHasBias) copy_table(p, item, stage);
  };
  const auto compute = [&](const Item& item, std::uint32_t stage, std::uint32_t rows, const auto& phases,
                           auto& key_bias) {
    if (!tile.has_rows) return;
    RowStatistics<Element> statistics(p, item, tables.row_indices);
    [[maybe_unused]] const ItemSink sink(p, item);
    const Operand queries(rows), cotangents(rows + buffer);
    statistics.find_delta(cotangents, Operand(rows + 2 * buffer));
    key_bias.prepare(item);
    phases.rows_are_read();
    statistics.template finish<kFeature>(p, [&](int r, float4 numbers) { p.statistics[statistics.at[r]] = numbers; });
    if constexpr (!Items::kPerEntry) {
      sink.write_part(p, item, statistics.at, statistics.logsumexp, statistics.delta);
    }
    float gradient[kHeadDim / 8][4] = {};
    add_query_gradient<ColumnRows<kHeadDim, kHasBoxes>, kFeature>(gradient, statistics, queries, cotangents,
                                                                  item.exponent_scale(p), tile, tables,
                                                                  additional_pairs, stage, shared_address(raw));
    phases.columns_are_read();
    key_bias.release(item);
    if constexpr (kHasBias) write_record<Element>(p, tile, shared_address(raw), item);
    const float scale = item.scale(p).query_gradient;
    const auto store = [&](std::uint32_t results) {
      Rows::template store<Element>(gradient, scale, scale, tables.row_indices,
                                    row_of(p.query_gradient, item.query_row, head_dims.key), head_dims.key, results);
    };
    if constexpr (kHasBias && kHasBoxes) {
      const bool is_in_sums = has_results_in_sums(p.region.record, kHeadDim);
      char* const sums = sums_of_warp(p, raw);
      store(is_in_sums ? shared_address(sums) : rows + staging);
      if (is_in_sums) clear_warp_memory(sums, Rows::kBytes);
    } else {
      store(rows + staging);
    }
  };
  for_plans<Items, Owner::kQueries>(p, raw, [&](const Items& items, const EntryLayout& layout, bool is_first) {
    loads.take(items, is_first);
    if constexpr (!Items::kPerEntry) clear_parts_of_sinks(p, items);
    const auto load_first_rows = [&] { loads.load_first_rows(items.at(p, 0), warp * Rows::kBytes, load_rows); };
    if (!make_plan<kHeadDim, Owner::kQueries, kHasBoxes, kFeature>(p, raw, tables, tile, loads, load_first_rows,
                                                                   layout)) {
      return;
    }
    if constexpr (kHasBias) clear_sums(p, raw);
    ColumnKeyBias<kHasKeyBias> key_bias(p, tables, tile, items.at(p, 0));
    loads.for_items(tables, tile, warp * Rows::kBytes, load_rows, load_columns,
                    [&](const Item& item, std::uint32_t stage, std::uint32_t rows, const auto& phases) {
                      compute(item, stage, rows, phases, key_bias);
                    });
  });
}

template <class Element, int kHeadDim, bool kHasBoxes, Feature kFeature, class Items>
__global__ void __launch_bounds__(32 * resident_warps(Kernel::kQueryGradient, kHeadDim))
    natten_jax_small_query_gradient(const __grid_constant__ BackwardParams p) {
  if constexpr (is_compiled(kHasBoxes)) {
    differentiate_queries<Element, kHeadDim, kHasBoxes, kFeature, Items>(p);
  }
}

}  // namespace natten_jax::small
