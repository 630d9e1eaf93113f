// Key and value gradients for small windows: a warp owns 16 keys, and its columns are the queries that see them. The
// warp accumulates all of these keys' gradients in registers, not in global memory, so that results are deterministic.
#pragma once

#include <cmath>

#include "cuda/common/arithmetic.cuh"
#include "cuda/small/cta_plans.cuh"
#include "cuda/small/key_bias.cuh"
#include "cuda/small/products.cuh"
#include "cuda/small/seams.cuh"
#include "cuda/small/sinks_parts.cuh"
#include "natten_jax/logsumexp.h"

namespace natten_jax::small {

/// Starts to copy the statistics of the queries that are columns into a stage.
CUTE_DEVICE void copy_statistics(const CommonParams& p, const Tables& tables, const float4* statistics,
                                 std::uint32_t stage, int column_bytes) {
  for (int i = threadIdx.x; i < tables.columns; i += blockDim.x) {
    const int2 column = tables.column_offsets[i];
    copy_chunk(stage + p.region.shared.statistics + column.y / column_bytes * kStatisticsBytes,
               reinterpret_cast<const char*>(statistics + column.x * p.heads), 16);
  }
}

CUTE_DEVICE float2 load_statistic(std::uint32_t address) {
  float2 result;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(result.x), "=f"(result.y) : "r"(address) : "memory");
  return result;
}

/// True if at least one of a tile's columns needs the remainder of its logsumexp. For such a column, the statistics
/// have NaN instead of the logsumexp.
CUTE_DEVICE bool are_large(const TilePlan& tile, const Tables& tables, std::uint32_t stage, int column_bytes) {
  const int lane = threadIdx.x % 32;
  bool result = false;
  CUTE_NO_UNROLL
  for (int i = lane / 16; i < tile.pairs; i += 2) {
    const std::uint32_t at = stage + tile.statistic_of_column + tables.offsets[i] / column_bytes * kStatisticsBytes;
    result |= isnan(load_statistic(at).x);
  }
  return __any_sync(0xffffffffu, result);
}

/// Values for the two keys that are a lane's rows: their biases, divided by the scale, and the sums of the gradients of
/// their logits. Each number is stored twice, in accumulator order.
struct KeyBiasSums {
  float biases[4] = {}, sums[4] = {};
};

/// Accumulates a tile's unscaled key gradients and its value gradients. `weights` converts the products of two columns
/// to softmax weights in place. With key biases, also adds up each key's logit gradients, rounded to the element type,
/// with MMA.
template <class Columns, Feature kFeature, class Element, int kHeadDim, class Weights>
CUTE_DEVICE void add_key_value_gradients(float (&key_sums)[kHeadDim / 8][4], float (&value_sums)[kHeadDim / 8][4],
                                         KeyBiasSums& key_bias_sums, const RowOperand<Element, kHeadDim>& keys,
                                         const RowOperand<Element, kHeadDim>& values, const TilePlan& tile,
                                         const Tables& tables, std::uint32_t stage, const Weights& weights) {
  for_pairs<Columns, 2, Owner::kKeys, kFeature>(tile, tables, 0, stage, [&](const auto& pairs) {
    constexpr int kPairs = std::decay_t<decltype(pairs)>::kCount;
    PairLogits x[kPairs], y[kPairs];
    multiply_keys<Element, kHeadDim, Owner::kKeys, kFeature>(x, keys, tile, stage, pairs, key_bias_sums.biases);
    multiply_columns<Element, kHeadDim, kSecondArray>(y, values, pairs);
    std::uint32_t a[kPairs][4], b[kPairs][4];
    CUTE_UNROLL
    for (int i = 0; i < 2 * kPairs; ++i) {
      const int pair = i / 2, h = i % 2;
      const std::uint32_t at =
          stage + tile.statistic + pairs.at[pair].offset / (Columns::kBytes / kStatisticsBytes) + h * tile.next_group;
      const float2 first = load_statistic(at), second = load_statistic(at + tile.next_statistic);
      float (&group_x)[4] = x[pair][h], (&group_y)[4] = y[pair][h];
      weights(group_x, first, second, at);
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        const std::uint32_t hidden = hidden_halves(masks_of_group(pairs.masks[pair], h), r);
        const float low = group_x[2 * r], high = group_x[2 * r + 1];
        a[pair][2 * h + r] = pack<Element>(low, high) & ~hidden;
        b[pair][2 * h + r] =
            pack<Element>(low * (group_y[2 * r] - first.y), high * (group_y[2 * r + 1] - second.y)) & ~hidden;
      }
    }
    add_columns<Element, kHeadDim, kSecondArray>(value_sums, a, pairs);
    add_columns<Element, kHeadDim, kFirstArray>(key_sums, b, pairs);
    if constexpr (kFeature == Feature::kKeyBias) {
      const std::uint32_t ones = pack<Element>(1.f, 1.f);
      float (&sums)[4] = key_bias_sums.sums;
      CUTE_UNROLL
      for (int pair = 0; pair < kPairs; ++pair) {
        HalfInstruction<Element>::fma(sums[0], sums[1], sums[2], sums[3], b[pair][0], b[pair][1], b[pair][2],
                                      b[pair][3], ones, ones, sums[0], sums[1], sums[2], sums[3]);
      }
    }
  });
}

/// Key and value gradients of a tile, summed over one or more sets of columns. For example, the queries of each query
/// head that shares a key/value head form one set. With `kIsSingle`, there is a single set.
template <class Element, int kHeadDim, bool kIsSingle>
struct KeyValueSums {
  float key_sums[kHeadDim / 8][4] = {}, value_sums[kHeadDim / 8][4] = {};

  /// Adds the gradients that come from one set of columns.
  template <class Columns, Feature kFeature>
  CUTE_DEVICE void add(KeyBiasSums& key_bias_sums, const RowOperand<Element, kHeadDim>& keys,
                       const RowOperand<Element, kHeadDim>& values, float factor, const TilePlan& tile,
                       const Tables& tables, std::uint32_t stage) {
    const auto differentiate = [&](const auto& weights) {
      add_key_value_gradients<Columns, kFeature>(key_sums, value_sums, key_bias_sums, keys, values, tile, tables, stage,
                                                 weights);
    };
    const auto differentiate_small = [&] {
      differentiate([&](float (&x)[4], float2 first, float2 second, std::uint32_t) {
        CUTE_UNROLL
        for (int r = 0; r < 2; ++r) {
          x[2 * r] = fast_exp2(fmaf(x[2 * r], factor, -first.x));
          x[2 * r + 1] = fast_exp2(fmaf(x[2 * r + 1], factor, -second.x));
        }
      });
    };
    const auto differentiate_large = [&] {
      differentiate([&](float (&x)[4], float2, float2, std::uint32_t at) {
        const float2 first = load_statistic(at + 8), second = load_statistic(at + 8 + tile.next_statistic);
        CUTE_UNROLL
        for (int r = 0; r < 2; ++r) {
          x[2 * r] = weight_of_large(x[2 * r], factor, first.x, first.y);
          x[2 * r + 1] = weight_of_large(x[2 * r + 1], factor, second.x, second.y);
        }
      });
    };
    if constexpr (kIsSingle) {
      // Check the sums, which become NaN if a logsumexp is NaN. Checking all columns before the computation would take
      // 110 instructions.
      differentiate_small();
      if (!__any_sync(0xffffffffu, isnan(value_sums[0][0]) || isnan(value_sums[0][2]))) return;
      *this = {};
      for (float& sum : key_bias_sums.sums) sum = 0.f;
      differentiate_large();
    } else if (are_large(tile, tables, stage, Columns::kBytes)) {
      differentiate_large();
    } else {
      differentiate_small();
    }
  }

  /// Writes the key gradients and the value gradients to global memory, each through a buffer in shared memory. The two
  /// buffers may be the same.
  template <bool kHasBoxes>
  CUTE_DEVICE void store(const BackwardParams& p, float scale, int key_row, const int2* row_indices,
                         const HeadDims<kHeadDim, kHasBoxes>& head_dims, std::uint32_t first_buffer,
                         std::uint32_t second_buffer) const {
    using Rows = RowTile<kHeadDim>;
    Rows::template store<Element>(key_sums, scale, scale, row_indices, row_of(p.key_gradient, key_row, head_dims.key),
                                  head_dims.key, first_buffer);
    Rows::template store<Element>(value_sums, 1.f, 1.f, row_indices, row_of(p.value_gradient, key_row, head_dims.value),
                                  head_dims.value, second_buffer);
  }
};

/// Computes key and value gradients. `kIsSingle`: each query head has a separate key/value head.
template <class Element, int kHeadDim, bool kHasBoxes, bool kIsSingle, Feature kFeature, class Items>
CUTE_DEVICE void differentiate_keys(const BackwardParams& p) {
  constexpr bool kHasBias = kFeature == Feature::kRelativeBias, kHasKeyBias = kFeature == Feature::kKeyBias;
  using Rows = RowTile<kHeadDim>;
  using Operand = RowOperand<Element, kHeadDim>;
  using Columns = ColumnRows<kHeadDim, kHasBoxes>;
  extern __shared__ __align__(1024) char raw[];
  Tables tables;
  TilePlan tile;
  Loads<kHeadDim, Kernel::kKeyValueGradient, kHasBoxes, Items, kHasBias> loads(p, raw);
  const int warp = threadIdx.x / 32;
  const std::uint32_t buffer = p.region.warps * Rows::kBytes, staging = kHasBoxes ? 2 * buffer : 0;
  const HeadDims<kHeadDim, kHasBoxes> head_dims(p);

  const auto load_rows = [&](const Item& item, std::uint32_t rows) {
    const int key_row = item.key_row(p);
    const auto copy_rows = [&](const void* array, int width, std::uint32_t to) {
      Rows::copy(tables.row_indices, row_of(array, key_row, width), width, to);
    };
    copy_rows(p.key, head_dims.key, rows);
    copy_rows(p.value, head_dims.value, rows + buffer);
  };
  const ColumnCopies<kHeadDim, kHasBoxes> copy(p.heads, p.head_dim, p.head_dim_v);
  const auto load_columns = [&](const Item& item, std::uint32_t stage) {
    copy.box(tables, row_of(p.query, item.query_row, p.head_dim), row_of(p.out_cotangent, item.query_row, p.head_dim_v),
             stage);
    copy_statistics(p, tables, p.statistics + item.query_row, stage, Columns::kBytes);
    if constexpr (kHasBias) copy_table(p, item, stage);
  };

  using Sums = KeyValueSums<Element, kHeadDim, kIsSingle>;
  Sums shared_sums;
  const auto compute = [&](const Item& item, std::uint32_t stage, std::uint32_t rows, const auto& phases,
                           auto& key_bias) {
    if (!tile.has_rows) return;
    Sums single_sums;
    Sums& sums = kIsSingle ? single_sums : shared_sums;
    const Operand keys(rows), values(rows + buffer);
    KeyBiasSums key_bias_sums;
    if constexpr (kHasKeyBias) key_bias.take(key_bias_sums.biases, item.scale(p).logits);
    phases.rows_are_read();
    sums.template add<Columns, kFeature>(key_bias_sums, keys, values, item.exponent_scale(p), tile, tables, stage);
    phases.columns_are_read();
    if constexpr (kHasKeyBias) {
      // Load the next item's biases while results are written, because the biases initialize the accumulators of the
      // next products.
      Item next = item;
      next.next(p);
      if (next.number(p) < p.items) key_bias.load(next);
      key_bias.store(item, key_bias_sums.sums);
    }
    if constexpr (!kIsSingle) {
      // Query heads that share a key/value head are consecutive.
      const int heads_per_kv = p.by_heads_per_kv.divisor;
      if (item.head - item.head_kv(p) * heads_per_kv != heads_per_kv - 1) return;
    }
    sums.store(p, item.scale(p).logits, item.key_row(p), tables.row_indices, head_dims, rows + staging,
               rows + (kHasBoxes ? staging : buffer));
    if constexpr (!kIsSingle) sums = {};
  };
  for_plans<Items, Owner::kKeys>(p, raw, [&](const Items& items, const EntryLayout& layout, bool is_first) {
    loads.take(items, is_first);
    const auto load_first_rows = [&] { loads.load_first_rows(items.at(p, 0), warp * Rows::kBytes, load_rows); };
    if (!make_plan<kHeadDim, Owner::kKeys, kHasBoxes, kFeature>(p, raw, tables, tile, loads, load_first_rows, layout))
      return;
    RowKeyBias<kHasKeyBias> key_bias(p, tables.row_indices);
    if (kHasKeyBias && tile.has_rows) key_bias.load(items.at(p, 0));
    loads.for_items(tables, tile, warp * Rows::kBytes, load_rows, load_columns,
                    [&](const Item& item, std::uint32_t stage, std::uint32_t rows, const auto& phases) {
                      compute(item, stage, rows, phases, key_bias);
                    });
  });
}

template <class Element, int kHeadDim, bool kHasBoxes, bool kIsSingle, Feature kFeature, class Items>
__global__ void __launch_bounds__(32 * resident_warps(Kernel::kKeyValueGradient, kHeadDim))
    natten_jax_small_key_value_gradient(const __grid_constant__ BackwardParams p) {
  if constexpr (is_compiled(kHasBoxes)) {
    differentiate_keys<Element, kHeadDim, kHasBoxes, kIsSingle, kFeature, Items>(p);
    if constexpr (!Items::kPerEntry) {
      extern __shared__ __align__(1024) char raw[];
      add_up_sinks(p.sinks, reinterpret_cast<float*>(raw + p.region.shared.row_indices));
    }
  }
}

}  // namespace natten_jax::small
