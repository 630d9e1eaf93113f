// Backward neighborhood attention for any GPU since Ampere.
//
// A CTA processes one key/value tile, or several in sequence if there are fewer CTAs than tiles. For every query head
// that shares the tile's key/value head, the CTA iterates over the query tiles that attend to (see) any key of the
// tile. A step processes `kQueries` queries of a query tile:
//
//   S^T = K Q^T, dP^T = V dO^T    P = exp(scale * S - logsumexp)    dS = P * (dP - delta)
//   dV += P^T dO, dK += dS^T Q    accumulated in registers          dQ += dS K    accumulated in global memory
//
// Different CTAs add to dQ in any order, but a single CTA adds in a fixed order. So results are reproducible if one CTA
// processes all key/value tiles of a head and dilation group. Warps exchange P and dS through shared memory.
#pragma once

#include <cmath>

#include "cuda/sm80/backward_load.cuh"
#include "cuda/sm80/backward_logits.cuh"
#include "cuda/sm80/backward_traits.cuh"
#include "cuda/warp/mma.cuh"

namespace natten_jax::sm80 {

/// Atomically adds `x` and `y` to two neighboring floats in global memory.
CUTE_DEVICE void add_pair(float* sums, float x, float y) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(sums), "f"(x), "f"(y) : "memory");
#else
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(sums), "f"(x) : "memory");
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(sums + 1), "f"(y) : "memory");
#endif
}

template <class Element>
CUTE_DEVICE void write_pair(Element* destination, float x, float y) {
  if constexpr (sizeof(Element) == 4) {
    *reinterpret_cast<float2*>(destination) = make_float2(x, y);
  } else {
    *reinterpret_cast<std::uint32_t*>(destination) = pack<Element>(x, y);
  }
}

/// The rows (keys) and columns (elements of the head) of a tile's dK and dV that a warp computes.
template <class Traits>
struct KeyGradients {
  using Element = typename Traits::Element;
  using Product = typename Traits::Product;
  static constexpr int kRows = Traits::kKeyRows, kColumns = Traits::kKeyColumns;
  using Accumulator = float[kRows / 16][kColumns / 8][4];

  const int key0 = threadIdx.x / 32 / Traits::KeyWarps::kColumnWarps * kRows;
  const int element0 = threadIdx.x / 32 % Traits::KeyWarps::kColumnWarps * kColumns;

  /// Adds a step's contribution to dV (`weights` = P, `queries` = dO) or to dK (`weights` = dS, `queries` = Q).
  CUTE_DEVICE void add(Accumulator& gradient, const char* weights, const char* queries) const {
    const typename Product::template ReadPairedA<typename Traits::WeightTile> read_a(shared_address(weights), key0);
    const typename Product::template ReadTransposedB<typename Traits::Tile> read_b(shared_address(queries), element0);
    accumulate<Product, kRows / 16, kColumns / 16, Traits::kQueries / Product::kStep>(
        gradient, [&](auto& a, int m, int i) __attribute__((always_inline)) { read_a(a, 16 * m, i); },
        [&](auto& b, int n, int i) __attribute__((always_inline)) { read_b(b, 16 * n, i); });
  }

  /// Writes a gradient to global memory. `first` is the index in `data` of the first element of token 0.
  CUTE_DEVICE void write(const BackwardParams& p, const typename Traits::SharedStorage& shared, void* data,
                         std::int64_t first, const Accumulator& gradient, int head_dim, float scale) const {
    const int lane = threadIdx.x % 32, lane4 = lane % 4;
    CUTE_UNROLL
    for (int i = 0; i < kRows / 8; ++i) {
      const int token = shared.row_windows[key0 + lane / 4 + 8 * i][0].w;
      if (token < 0) continue;
      Element* row = static_cast<Element*>(data) + first + static_cast<std::int64_t>(token) * p.heads_kv * head_dim;
      CUTE_UNROLL
      for (int n = 0; n < kColumns / 8; ++n) {
        const int element = element0 + 8 * n;
        const float* pair = &gradient[i / 2][n][i % 2 * 2];
        if (element < head_dim) write_pair(row + element + 2 * lane4, pair[0] * scale, pair[1] * scale);
      }
    }
  }
};

/// Adds dS K of a step to dQ in global memory.
template <class Traits>
CUTE_DEVICE void add_query_gradient(const BackwardParams& p, const typename Traits::SharedStorage& shared,
                                    const QueryStep& step, const KeyHead& own) {
  using Product = typename Traits::Product;
  using Warps = typename Traits::QueryWarps;
  constexpr int kRows = Traits::kQueryRows, kColumns = Traits::kQueryColumns;
  const int lane = threadIdx.x % 32, lane4 = lane % 4, warp = threadIdx.x / 32;
  const int query0 = warp / Warps::kColumnWarps * kRows, element0 = warp % Warps::kColumnWarps * kColumns;
  float d_query[kRows / 16][kColumns / 8][4] = {};
  const typename Product::template ReadTransposedA<typename Traits::WeightTile> read_a(shared_address(shared.d_logits),
                                                                                       query0);
  const typename Product::template ReadTransposedB<typename Traits::Tile> read_b(shared_address(shared.k), element0);
  accumulate<Product, kRows / 16, kColumns / 16, Traits::kKeys / Product::kStep>(
      d_query, [&](auto& a, int m, int i) __attribute__((always_inline)) { read_a(a, 16 * m, i); },
      [&](auto& b, int n, int i) __attribute__((always_inline)) { read_b(b, 16 * n, i); });
  // For 16-bit elements, a later kernel scales dQ when it converts the float32 sums.
  const float scale = sizeof(typename Traits::Element) == 4 ? own.scale(p).query_gradient : 1.f;
  // Computed once for all pairs of elements, because a test per pair would add a branch per pair.
  const bool is_whole = element0 + kColumns <= p.head_dim;
  float* sums = p.query_gradient + own.batch * p.query_gradient_batch + own.query_head(step) * p.query_gradient_head +
                element0 + 2 * lane4;
  CUTE_UNROLL
  for (int i = 0; i < kRows / 8; ++i) {
    const int token = shared.query_tokens[query0 + lane / 4 + 8 * i];
    if (token < 0) continue;
    float* token_sums = sums + token * p.query_gradient_token;
    const auto add = [&](int n) __attribute__((always_inline)) {
      const float* pair = &d_query[i / 2][n][i % 2 * 2];
      add_pair(token_sums + 8 * n, pair[0] * scale, pair[1] * scale);
    };
    if (is_whole) {
      CUTE_UNROLL
      for (int n = 0; n < kColumns / 8; ++n) add(n);
    } else {
      CUTE_UNROLL
      for (int n = 0; n < kColumns / 8; ++n) {
        if (element0 + 8 * n < p.head_dim) add(n);
      }
    }
  }
}

/// Starts the copies of the queries of the step after `step`, if there is one.
template <class Traits>
CUTE_DEVICE void load_next(const BackwardParams& p, typename Traits::SharedStorage& shared, const QueryStep& step,
                           const KeyHead& own, int stage) {
  QueryStep next = step;
  next.next(p, shared.box, Traits::kQueries);
  if (next.head < own.queries) load_queries<Traits>(p, shared, next, own, stage);
}

/// The backward kernel. If `kIsPlain`, it supports only plain launches (`is_plain`), otherwise all launches.
///
/// A single kernel for all launches would make plain launches slower (H100): by 1.5% because it supports scales per
/// head (heads of 64), and by 1 to 3% because it supports layouts per batch entry and dimensions that cut or wrap
/// windows (heads of 128).
template <class Traits, bool kIsPlain>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    natten_jax_sm80_fna_backward(const __grid_constant__ BackwardParams p) {
  constexpr int kStages = Traits::kStages;
  extern __shared__ __align__(128) char raw[];
  auto& shared = shared_storage<typename Traits::SharedStorage, true>(raw);
  int outer, split, group;
  p.by_splits(outer, split, blockIdx.x);
  p.by_groups(outer, group, outer);
  const KeyHead own(p, outer, !kIsPlain);
  const LogitTile<Traits> logits(p, shared);
  const KeyGradients<Traits> gradients;

  for (int tile = split; tile < p.tiles; tile += p.splits) {
    __syncthreads();  // all threads have read the tables of the previous tile
    if (!plan_keys<Traits, kIsPlain>(p, own.batch, tile, group, shared)) continue;
    __syncthreads();
    load_keys<Traits>(p, shared, own);

    typename KeyGradients<Traits>::Accumulator d_key = {}, d_value = {};
    const TokenBox& box = shared.box;
    const bool has_queries = box.begin.x < box.end.x && box.begin.y < box.end.y && box.begin.z < box.end.z;
    QueryStep step{QueryWalk(box.begin), 0, has_queries ? 0 : own.queries};
    BiasSumsOf<Traits> bias_sums;
    if constexpr (Traits::kHasKeyBias) {
      if (!has_queries) bias_sums.write_zeros(p, shared, own);
      load_biases<Traits>(p, shared, own, 0);
    }
    int stage = 0;
    if (step.head < own.queries) load_queries<Traits>(p, shared, step, own, 0);
    while (step.head < own.queries) {
      wait_copies<0>();
      if constexpr (Traits::kHasKeyBias) mask_queries_without_keys<Traits>(shared, stage);
      __syncthreads();  // the step's queries are loaded; all threads have read P and dS of the previous step
      if (kStages == 2) load_next<Traits>(p, shared, step, own, stage ^ 1);
      store_query_tokens<Traits>(p, shared, step);
      if (Traits::kLogitWarps == Traits::kWarps || threadIdx.x / 32 < Traits::kLogitWarps) {
        logits.compute(step, own, stage, bias_sums);
      }
      __syncthreads();  // P and dS are written
      gradients.add(d_value, shared.weights, shared.d_out[stage]);
      gradients.add(d_key, shared.d_logits, shared.q[stage]);
      if (kStages == 1) {
        __syncthreads();  // all threads have read the step's queries
        load_next<Traits>(p, shared, step, own, 0);
      }
      add_query_gradient<Traits>(p, shared, step, own);
      const int head = step.head;
      step.next(p, box, Traits::kQueries);
      if constexpr (Traits::kHasKeyBias) {
        if (step.head != head) {
          bias_sums.finish(p, shared, own, head);
          if (step.head < own.queries) load_biases<Traits>(p, shared, own, step.head);
        }
      }
      if (kStages == 2) stage ^= 1;
    }

    gradients.write(p, shared, p.key_gradient, own.first(p, p.head_dim), d_key, p.head_dim, own.scale(p).logits);
    gradients.write(p, shared, p.value_gradient, own.first(p, p.head_dim_v), d_value, p.head_dim_v, 1.f);
  }
  wait_copies<0>();
}

}  // namespace natten_jax::sm80
