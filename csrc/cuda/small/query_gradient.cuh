// Query gradients for small windows: as the forward pass, a warp owns 16 queries. It also works out what the kernel of
// key and value gradients needs to know of them.
#pragma once

#include <cmath>

#include "cuda/common/arithmetic.cuh"
#include "cuda/small/products.cuh"
#include "natten_jax/logsumexp.h"

namespace natten_jax::small {

/// Sums of products of a lane's two rows, as RowOperand has them, over the four lanes that share a row: each twice, as
/// accumulators have their rows.
template <class Element, int kHeadDim>
CUTE_DEVICE void multiply_rows(float (&result)[4], const RowOperand<Element, kHeadDim>& a,
                               const RowOperand<Element, kHeadDim>& b) {
  float sum[2] = {};
  using Pair = typename ElementTraits<Element>::Pair;
  CUTE_UNROLL
  for (int step = 0; step < kHeadDim / 16; ++step) {
    const auto of_a = a(step), of_b = b(step);
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      float2 u, v;
      if constexpr (std::is_same_v<Element, cutlass::half_t>) {
        u = __half22float2(reinterpret_cast<const Pair&>(of_a.r[i]));
        v = __half22float2(reinterpret_cast<const Pair&>(of_b.r[i]));
      } else {
        u = __bfloat1622float2(reinterpret_cast<const Pair&>(of_a.r[i]));
        v = __bfloat1622float2(reinterpret_cast<const Pair&>(of_b.r[i]));
      }
      sum[i % 2] = fmaf(u.x, v.x, fmaf(u.y, v.y, sum[i % 2]));
    }
  }
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 1);
    // Two lanes have the same number. To the compiler they are different ones, which stay in registers side by side as
    // the matrix units take them: else it would move them there for each group.
    result[2 * r] = sum[r] + __shfl_xor_sync(0xffffffffu, sum[r], 2);
    result[2 * r + 1] = sum[r] + __shfl_xor_sync(0xffffffffu, sum[r], 3);
  }
}

template <class Element, int kHeadDim, bool kHasBoxes>
CUTE_DEVICE void differentiate_queries(const BackwardParams& p) {
  using Rows = RowTile<kHeadDim>;
  using Operand = RowOperand<Element, kHeadDim>;
  using Columns = ColumnRows<kHeadDim, kHasBoxes>;
  extern __shared__ __align__(1024) char raw[];
  allow_next_kernel();  // which plans meanwhile
  Tables tables;
  TilePlan tile;
  Loads<kHeadDim, false, kHasBoxes> loads(p, raw);
  if (!make_plan<kHeadDim, false, kHasBoxes>(p, raw, tables, tile, loads)) return;

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const std::uint32_t buffer = p.region.warps * Rows::kBytes, staging = kHasBoxes ? 3 * buffer : 0;
  const float factor = p.scale * kLog2E;

  const auto load_rows = [&](const Item& item, std::uint32_t rows) {
    const auto copy_rows = [&](const void* array, int width, int number) {
      Rows::copy(tables.row_tokens, row_of(array, item.of_query, width), p.heads, width, rows + number * buffer);
    };
    copy_rows(p.query, p.head_dim, 0);
    copy_rows(p.out_cotangent, p.head_dim_v, 1);
    copy_rows(p.out, p.head_dim_v, 2);
  };
  const ColumnCopy<kHeadDim> copy(p.heads_kv, p.head_dim, p.head_dim_v);
  const auto load_columns = [&](const Item& item, std::uint32_t stage) {
    const int of_key = item.of_key(p);
    copy.box(tables, copy.source(row_of(p.key, of_key, p.head_dim), row_of(p.value, of_key, p.head_dim_v)), stage);
  };
  const auto compute = [&](const Item& item, std::uint32_t stage, std::uint32_t rows, const auto& phases) {
    if (!tile.has_rows) return;
    // First, what takes longest to come; the lane's two rows.
    int at[2];
    float logsumexp[2] = {}, remainder[2] = {}, delta[4] = {}, logsumexp_cotangent[2] = {};
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int token = tables.row_tokens[lane / 4 + 8 * r];
      at[r] = token < 0 ? -1 : item.of_query + token * p.heads;
      if (token < 0) continue;
      logsumexp[r] = p.logsumexp[at[r]];
      if (p.logsumexp_cotangent != nullptr) logsumexp_cotangent[r] = p.logsumexp_cotangent[at[r]];
    }
    const Operand queries(rows), cotangents(rows + buffer);
    multiply_rows(delta, cotangents, Operand(rows + 2 * buffer));
    phases.rows_are_read();
    bool is_large = false;
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      if (at[r] < 0) continue;
      logsumexp[r] = base2_logsumexp(logsumexp[r]);
      delta[2 * r] -= logsumexp_cotangent[r];
      delta[2 * r + 1] -= logsumexp_cotangent[r];
      const bool is_row_large = has_remainder<Element>(logsumexp[r]);
      if (is_row_large && p.remainder != nullptr) remainder[r] = p.remainder[at[r]];
      is_large |= is_row_large;
      if (lane % 4 == 0) {
        p.statistics[at[r]] = make_float4(is_row_large ? NAN : logsumexp[r], delta[2 * r], logsumexp[r], remainder[r]);
      }
    }
    const float initial[4] = {-delta[0], -delta[1], -delta[2], -delta[3]};
    float gradient[kHeadDim / 8][4] = {};
    const auto differentiate = [&](auto weight) {
      for_pairs<Columns, 2>(tile, tables, 0, stage, [&](const auto& pairs) {
        constexpr int kPairs = std::decay_t<decltype(pairs)>::kCount;
        PairLogits x[kPairs], y[kPairs];
        multiply_columns<Element, kHeadDim, false>(x, queries, pairs);
        multiply_columns<Element, kHeadDim, true>(y, cotangents, pairs, initial);
        std::uint32_t a[kPairs][4];
        CUTE_UNROLL
        for (int i = 0; i < 4 * kPairs; ++i) {
          const int pair = i / 4, h = i / 2 % 2, r = i % 2;
          const float *of_x = &x[pair][h][2 * r], *of_y = &y[pair][h][2 * r];
          a[pair][i % 4] = pack<Element>(weight(of_x[0], r) * of_y[0], weight(of_x[1], r) * of_y[1]) &
                           ~hidden_halves(masks_of_group(pairs.masks[pair], h), r);
        }
        add_columns<Element, kHeadDim, false>(gradient, a, pairs);
      });
    };
    if (__any_sync(0xffffffffu, is_large)) {
      differentiate([&](float x, int r) { return weight_of_large(x, factor, logsumexp[r], remainder[r]); });
    } else {
      differentiate([&](float x, int r) { return fast_exp2(fmaf(x, factor, -logsumexp[r])); });
    }
    phases.columns_are_read();
    Rows::template store<Element>(gradient, p.scale, p.scale, tables.row_tokens,
                                  row_of(p.query_gradient, item.of_query, p.head_dim), p.heads, p.head_dim,
                                  rows + staging);
  };
  loads.for_items(tables, tile, warp * Rows::kBytes, load_rows, load_columns, compute);
}

template <class Element, int kHeadDim, bool kHasBoxes>
__global__ void __launch_bounds__(32 * resident_warps(Kernel::kQueryGradient, kHeadDim))
    natten_jax_small_query_gradient(const __grid_constant__ BackwardParams p) {
  if constexpr (is_compiled(kHasBoxes)) differentiate_queries<Element, kHeadDim, kHasBoxes>(p);
}

}  // namespace natten_jax::small
