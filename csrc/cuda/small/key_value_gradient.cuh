// Key and value gradients for small windows: a warp owns 16 keys, and its columns are the queries that see them.
// Nothing is added up through memory: results do not depend on any order.
#pragma once

#include <cmath>

#include "cuda/common/arithmetic.cuh"
#include "cuda/small/products.cuh"
#include "natten_jax/logsumexp.h"

namespace natten_jax::small {

/// Copies what is known of the columns' queries into a stage.
CUTE_DEVICE void copy_statistics(const CommonParams& p, const Tables& tables, const float2* statistics,
                                 std::uint32_t stage, int column_bytes) {
  for (int i = threadIdx.x; i < tables.columns; i += blockDim.x) {
    const int2 place = tables.places[i];
    const float2* source = statistics + place.x * p.heads;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;"
                 :
                 : "r"(stage + p.region.shared.statistics + place.y / column_bytes * 8), "l"(source)
                 : "memory");
  }
}

CUTE_DEVICE float2 load_statistic(std::uint32_t address) {
  float2 result;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(result.x), "=f"(result.y) : "r"(address) : "memory");
  return result;
}

template <class Element, int kHeadDim>
__global__ void __launch_bounds__(32 * resident_warps(Kernel::kKeyValueGradient, kHeadDim))
    natten_jax_small_key_value_gradient(const __grid_constant__ BackwardParams p) {
  using Rows = RowTile<kHeadDim>;
  using Operand = RowOperand<Element, kHeadDim>;
  constexpr int kColumnBytes = 4 * kHeadDim;
  extern __shared__ __align__(128) char raw[];
  Tables tables;
  TilePlan tile;
  if (!make_plan<kHeadDim, true>(p, raw, tables, tile)) return;
  clear_stages(p.region, tables.stages);
  __syncthreads();

  const int warp = threadIdx.x / 32, heads_per_kv = p.heads / p.heads_kv;
  const std::uint32_t buffer = p.region.warps * Rows::kBytes, rows = p.region.shared.rows + warp * Rows::kBytes;
  const ColumnCopy<kHeadDim> copy(p.heads, p.head_dim, p.head_dim_v);
  const float factor = p.scale * kLog2E;

  const auto load = [&](const Item& item, std::uint32_t stage) {
    const int of_key = item.of_key(p);
    Rows::copy(tables.row_tokens, row_of(p.key, of_key, p.head_dim), p.heads_kv, p.head_dim, stage + rows);
    Rows::copy(tables.row_tokens, row_of(p.value, of_key, p.head_dim_v), p.heads_kv, p.head_dim_v,
               stage + rows + buffer);
    copy.box(
        tables,
        copy.source(row_of(p.query, item.of_query, p.head_dim), row_of(p.out_cotangent, item.of_query, p.head_dim_v)),
        stage);
    copy_statistics(p, tables, p.statistics + item.of_query, stage, kColumnBytes);
  };

  // Of a key/value head: sums over the query heads that share it, which follow each other.
  float of_keys[kHeadDim / 8][4] = {}, of_values[kHeadDim / 8][4] = {};
  const auto compute = [&](const Item& item, std::uint32_t stage) {
    // Whether the logsumexp of any of the region's queries needs its remainder: whoever copied it sees that it is NaN.
    bool is_large = false;
    const std::uint32_t statistics = stage + p.region.shared.statistics,
                        remainders = stage + p.region.shared.remainders;
    const auto statistic_of = [&](int2 place) { return statistics + place.y / kColumnBytes * 8; };
    for (int i = threadIdx.x; i < tables.columns; i += blockDim.x) {
      is_large |= isnan(load_statistic(statistic_of(tables.places[i])).x);
    }
    is_large = __syncthreads_or(is_large);
    if (is_large) {
      for (int i = threadIdx.x; i < tables.columns; i += blockDim.x) {
        const int2 place = tables.places[i];
        const int at = item.of_query + place.x * p.heads;
        const float logsumexp = base2_logsumexp(p.logsumexp[at]);
        const bool counts = p.remainder != nullptr && has_remainder<Element>(logsumexp);
        const std::uint32_t to = statistic_of(place);
        sm80::store_words(to, logsumexp, load_statistic(to).y);
        sm80::store_word(remainders + (to - statistics) / 2, __float_as_uint(counts ? p.remainder[at] : 0.f));
      }
      __syncthreads();
    }
    if (!tile.has_rows) return;
    const Operand keys(stage + rows), values(stage + rows + buffer);
    const auto differentiate = [&](auto weights) {
      for_pairs<1>(tile, tables, 0, stage, [&](const PairPlace& pair, std::uint32_t masks) {
        PairLogits x, y;
        multiply_columns<Element, kHeadDim, false>(x, keys, pair);
        multiply_columns<Element, kHeadDim, true>(y, values, pair);
        std::uint32_t a[4], b[4];
        CUTE_UNROLL
        for (int h = 0; h < 2; ++h) {
          const std::uint32_t at = stage + tile.statistic + pair.offset / (kColumnBytes / 8) + h * tile.next_group;
          const float2 first = load_statistic(at), second = load_statistic(at + tile.next_statistic);
          weights(x[h], first, second, at);
          CUTE_UNROLL
          for (int r = 0; r < 2; ++r) {
            const std::uint32_t hidden = hidden_halves(masks << (4 * h), r);
            const float low = x[h][2 * r], high = x[h][2 * r + 1];
            a[2 * h + r] = pack<Element>(low, high) & ~hidden;
            b[2 * h + r] = pack<Element>(low * (y[h][2 * r] - first.y), high * (y[h][2 * r + 1] - second.y)) & ~hidden;
          }
        }
        add_columns<Element, kHeadDim, true>(of_values, a, pair);
        add_columns<Element, kHeadDim, false>(of_keys, b, pair);
      });
    };
    if (is_large) {
      differentiate([&](float (&x)[4], float2 first, float2 second, std::uint32_t at) {
        const std::uint32_t of_first = remainders + (at - statistics) / 2;
        const float low = __uint_as_float(sm80::load_word(of_first));
        const float high = __uint_as_float(sm80::load_word(of_first + tile.next_statistic / 2));
        CUTE_UNROLL
        for (int r = 0; r < 2; ++r) {
          x[2 * r] = weight_of_large(x[2 * r], factor, first.x, low);
          x[2 * r + 1] = weight_of_large(x[2 * r + 1], factor, second.x, high);
        }
      });
    } else {
      differentiate([&](float (&x)[4], float2 first, float2 second, std::uint32_t) {
        CUTE_UNROLL
        for (int r = 0; r < 2; ++r) {
          x[2 * r] = fast_exp2(fmaf(x[2 * r], factor, -first.x));
          x[2 * r + 1] = fast_exp2(fmaf(x[2 * r + 1], factor, -second.x));
        }
      });
    }
    if (item.head - item.head_kv(p) * heads_per_kv != heads_per_kv - 1) return;
    const int of_key = item.of_key(p);
    Rows::template store<Element>(of_keys, p.scale, p.scale, tables.row_tokens,
                                  row_of(p.key_gradient, of_key, p.head_dim), p.heads_kv, p.head_dim, stage + rows);
    Rows::template store<Element>(of_values, 1.f, 1.f, tables.row_tokens,
                                  row_of(p.value_gradient, of_key, p.head_dim_v), p.heads_kv, p.head_dim_v,
                                  stage + rows + buffer);
    CUTE_UNROLL
    for (int i = 0; i < kHeadDim / 2; ++i) of_keys[i / 4][i % 4] = of_values[i / 4][i % 4] = 0.f;
  };
  for_items(p, shared_address(tables.stages), load, compute);
}

}  // namespace natten_jax::small
