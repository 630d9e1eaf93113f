// Backward neighborhood attention for any GPU since Ampere.
//
// A CTA owns a key/value tile (several in turn, where there are fewer CTAs than tiles) and walks over the query tiles
// of the box of queries that see some of its keys, for every query head of its key/value head:
//
//   S^T = K Q^T, dP^T = V dO^T    P = exp(scale * S - logsumexp)    dS = P * (dP - delta)
//   dV += P^T dO, dK += dS^T Q    in registers                      dQ += dS K    added to sums in memory
//
// One CTA adds to a sum in an order that does not change, so that results are reproducible where it does all tiles.
// Weights and dS pass from warp to warp through shared memory.
//
// One file, since nothing but this kernel uses its parts, which share one layout of shared memory and its barriers.
#pragma once

#include <cmath>

#include "cuda/common/axis_plan.cuh"
#include "cuda/common/column_mask.cuh"
#include "cuda/common/tile_walk.cuh"
#include "cuda/sm80/gather.cuh"
#include "cuda/sm80/params.h"
#include "cuda/sm80/products.cuh"
#include "natten_jax/logsumexp.h"

namespace natten_jax::sm80 {

constexpr int kMostQueries = 128;  // of a query tile

/// How the warps divide the rows and columns of a product.
template <int kRowWarps_, int kColumnWarps_>
struct WarpGrid {
  static constexpr int kRowWarps = kRowWarps_, kColumnWarps = kColumnWarps_;
};

template <class Element_, class Product_, int kHeadDim_, int kKeys_, int kQueries_, int kStages_, class LogitWarps_,
          class KeyWarps_, class QueryWarps_>
struct BackwardTraits {
  using Element = Element_;
  using Product = Product_;
  using LogitWarps = LogitWarps_;  // of products with a row per key and a column per query
  using KeyWarps = KeyWarps_;      // a row per key and a column per element of the head
  using QueryWarps = QueryWarps_;  // a row per query and a column per element of the head
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kKeys = kKeys_;
  static constexpr int kQueries = kQueries_;
  static constexpr int kStages = kStages_;  // query tiles in shared memory
  static constexpr int kWarps = KeyWarps::kRowWarps * KeyWarps::kColumnWarps;
  static constexpr int kLogitWarps = LogitWarps::kRowWarps * LogitWarps::kColumnWarps;
  static constexpr int kThreads = 32 * kWarps;
  static_assert(kLogitWarps <= kWarps);
  static_assert(QueryWarps::kRowWarps * QueryWarps::kColumnWarps == kWarps);
  using Tile = SharedTile<kHeadDim * sizeof(Element)>;
  using WeightTile = SharedTile<kQueries * sizeof(Element)>;

  using QueryCopy = Gather<Tile, kQueries, kThreads>;

  struct SharedStorage {
    alignas(128) char k[kKeys * Tile::kRowBytes];
    alignas(128) char v[kKeys * Tile::kRowBytes];
    alignas(128) char q[kStages][kQueries * Tile::kRowBytes];
    alignas(128) char d_out[kStages][kQueries * Tile::kRowBytes];
    alignas(128) char weights[kKeys * WeightTile::kRowBytes];
    alignas(128) char d_logits[kKeys * WeightTile::kRowBytes];
    float logsumexp[kStages][kQueries];
    float delta[kStages][kQueries];
    int query_tokens[kQueries];   // or -1
    TokenBox box;                 // queries that see some key
    int4 inner_begin, inner_end;  // queries that see every key
    TileRows<QueryCopy> rows;     // of query tiles
    int4 row_windows[kKeys][2];   // first query that sees the key (x, y, z) and its token, or -1; end of those queries
    std::uint32_t mask_words[QueryColumnMask::capacity(kMostQueries)];
  };
};

/// A few queries of a query tile, for one of the heads that share the keys.
struct QueryStep {
  QueryWalk walk;
  int column;  // first row of the query tile
  int head;    // of those that share the keys

  CUTE_DEVICE void next(const BackwardParams& p, const TokenBox& box, int queries) {
    column += queries;
    if (column < p.q_tile_tokens) return;
    column = 0;
    walk.next(p.axis, box.begin, box.end);
    if (walk.x < box.end.x) return;
    walk = QueryWalk(box.begin);
    ++head;
  }
};

CUTE_DEVICE void copy_word_async(std::uint32_t destination, const void* source, bool is_inside) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(destination), "l"(source), "r"(is_inside ? 4 : 0)
               : "memory");
}

/// Adds to two neighboring numbers in memory.
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

/// Finds the queries that see the keys of a tile; false where the tile has no keys. All threads take part.
template <class Traits>
CUTE_DEVICE bool plan_keys(const BackwardParams& p, int tile, int group, typename Traits::SharedStorage& shared) {
  int first_row = tile % p.parts * Traits::kKeys;
  if (p.is_additional) {
    const int first = tile * Traits::kKeys, tokens = static_cast<int>(p.keys);
    const int4 begin = make_int4(0, 0, 0, 0);
    const int4 end =
        make_int4(p.axis[0].query_local_extent, p.axis[1].query_local_extent, p.axis[2].query_local_extent, 0);
    for (int row = threadIdx.x; row < Traits::kKeys; row += Traits::kThreads) {
      const bool exists = first + row < tokens;
      shared.row_windows[row][0] = make_int4(0, 0, 0, exists ? first + row : -1);
      shared.row_windows[row][1] = exists ? end : begin;
    }
    if (threadIdx.x == 0) {
      shared.box = {begin, end, make_int4(end.y * end.z, end.z, 1, 0)};
      shared.inner_begin = begin;
      shared.inner_end = first + Traits::kKeys <= tokens ? end : begin;
    }
    return true;
  }
  int tile_index[3], residue[3];
  p.axis[2].by_kv_tiles(tile_index[1], tile_index[2], tile / p.parts);
  p.axis[1].by_kv_tiles(tile_index[0], tile_index[1], tile_index[1]);
  p.axis[2].by_dilation(group, residue[2], group);
  p.axis[1].by_dilation(residue[0], residue[1], group);
  const auto axis_plan = [&](int d) {
    return KeyAxisPlan(p.axis[d], residue[d], longest_first(p.axis[d], tile_index[d]),
                       Origin::load(p.origins, d, p.axis[d].dilation),
                       Origin::load(p.origins, 3 + d, p.axis[d].dilation));
  };
  const KeyAxisPlan axes[3] = {axis_plan(0), axis_plan(1), axis_plan(2)};
  for (int d = 0; d < 3; ++d) {
    if (axes[d].kv_begin >= axes[d].keys) return false;
  }
  for (int row = threadIdx.x; row < Traits::kKeys; row += Traits::kThreads) {
    const int in_tile = first_row + row;
    const int line = p.axis[2].by_kv_tile.divide(in_tile), x = p.axis[1].by_kv_tile.divide(line);
    const int at[3] = {x, line - x * p.axis[1].kv_tile, in_tile - line * p.axis[2].kv_tile};
    int token = 0;
    bool exists = in_tile < p.kv_tile_tokens;
    int2 seen[3];
    CUTE_UNROLL
    for (int d = 0; d < 3; ++d) {
      const int index = axes[d].kv_begin + at[d];
      exists = exists && index < axes[d].keys;
      token = token * p.axis[d].kv_local_extent + index * p.axis[d].dilation + residue[d];
      seen[d] = exists ? axes[d].seen_by(p.axis[d], index) : make_int2(0, 0);
    }
    shared.row_windows[row][0] = make_int4(seen[0].x, seen[1].x, seen[2].x, exists ? token : -1);
    shared.row_windows[row][1] = exists ? make_int4(seen[0].y, seen[1].y, seen[2].y, 0) : make_int4(0, 0, 0, 0);
  }
  if (threadIdx.x == 0) {
    int hull_begin[3], hull_end[3], inner_begin[3], inner_end[3], pitch[3], first_token = 0, tokens = 1;
    CUTE_UNROLL
    for (int d = 0; d < 3; ++d) {
      const int2 of_first = axes[d].seen_by(p.axis[d], axes[d].first),
                 of_last = axes[d].seen_by(p.axis[d], axes[d].last);
      hull_begin[d] = of_first.x;
      hull_end[d] = of_last.y;
      inner_begin[d] = of_last.x;
      inner_end[d] = axes[d].is_whole(p.axis[d]) && p.kv_tile_tokens % Traits::kKeys == 0 ? of_first.y : of_last.x;
      first_token = first_token * p.axis[d].query_local_extent + axes[d].query_residue;
    }
    CUTE_UNROLL
    for (int d = 2; d >= 0; --d) {
      pitch[d] = tokens * p.axis[d].dilation;
      tokens *= p.axis[d].query_local_extent;
    }
    shared.box = {make_int4(hull_begin[0], hull_begin[1], hull_begin[2], 0),
                  make_int4(hull_end[0], hull_end[1], hull_end[2], 0),
                  make_int4(pitch[0], pitch[1], pitch[2], first_token)};
    shared.inner_begin = make_int4(inner_begin[0], inner_begin[1], inner_begin[2], 0);
    shared.inner_end = make_int4(inner_end[0], inner_end[1], inner_end[2], 0);
  }
  return true;
}

/// Starts to copy the queries of a step, their output cotangents and what else belongs to them.
template <class Traits>
CUTE_DEVICE void load_queries(const BackwardParams& p, typename Traits::SharedStorage& shared, const QueryStep& step,
                              int batch, int head, int stage) {
  using Element = typename Traits::Element;
  using Copy = typename Traits::QueryCopy;
  const Copy copy;
  const TokenBox& box = shared.box;
  const QueryWalk& at = step.walk;
  const int first_token = box.token(at.x, at.y, at.z);
  const bool is_whole = step.column + Traits::kQueries <= p.q_tile_tokens && at.is_inside(p.axis, box.begin, box.end);
  int tokens[Copy::kPasses];
  shared.rows.load(copy, tokens, step.column, first_token);
  std::uint32_t visible = Copy::kAll;
  if (!is_whole) visible = shared.rows.visible(copy, box.end, at.x, at.y, at.z, step.column, p.q_tile_tokens);
  const auto copy_head = [&](char* tile, const void* data, int head_dim) {
    const int head_bytes = head_dim * static_cast<int>(sizeof(Element)), token_bytes = p.heads * head_bytes;
    const char* base =
        static_cast<const char*>(data) + (batch * p.queries * p.heads + head) * static_cast<std::int64_t>(head_bytes);
    copy.copy(shared_address(tile), base, token_bytes, head_bytes, tokens, visible);
  };
  copy_head(shared.q[stage], p.query, p.head_dim);
  copy_head(shared.d_out[stage], p.out_cotangent, p.head_dim_v);
  if (threadIdx.x < Traits::kQueries) {
    const int row = step.column + threadIdx.x;
    const bool exists = is_whole || shared.rows.is_visible(box.end, at.x, at.y, at.z, row, p.q_tile_tokens);
    const std::int64_t token = exists ? first_token + shared.rows.token(row) : 0;
    const std::int64_t i = (batch * p.queries + token) * p.heads + head;
    copy_word_async(shared_address(&shared.logsumexp[stage][threadIdx.x]), p.logsumexp + i, exists);
    copy_word_async(shared_address(&shared.delta[stage][threadIdx.x]), p.delta + i, exists);
  }
  commit_copies();
}

/// One function, since key and value gradients stay in registers from step to step, between barriers of the whole CTA.
template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    natten_jax_sm80_fna_backward(const __grid_constant__ BackwardParams p) {
  using Element = typename Traits::Element;
  using Product = typename Traits::Product;
  using Tile = typename Traits::Tile;
  using WeightTile = typename Traits::WeightTile;
  using Logits = typename Traits::LogitWarps;
  using ByKey = typename Traits::KeyWarps;
  using ByQuery = typename Traits::QueryWarps;
  constexpr int kKeys = Traits::kKeys, kQueries = Traits::kQueries, kThreads = Traits::kThreads;
  constexpr int kHeadDim = Traits::kHeadDim, kStages = Traits::kStages, kStep = Product::kStep;
  // Rows and columns of a warp.
  constexpr int kLogitRows = kKeys / Logits::kRowWarps, kLogitColumns = kQueries / Logits::kColumnWarps;
  constexpr int kKeyRows = kKeys / ByKey::kRowWarps, kKeyColumns = kHeadDim / ByKey::kColumnWarps;
  constexpr int kQueryRows = kQueries / ByQuery::kRowWarps, kQueryColumns = kHeadDim / ByQuery::kColumnWarps;
  extern __shared__ __align__(128) char raw[];
  auto& shared = *reinterpret_cast<typename Traits::SharedStorage*>(raw);
  const int lane = threadIdx.x % 32, lane4 = lane % 4, warp = threadIdx.x / 32;
  const std::uint32_t k = shared_address(shared.k), v = shared_address(shared.v);
  const std::uint32_t weights = shared_address(shared.weights), d_logits = shared_address(shared.d_logits);

  int outer, split, group, batch, kv_head;
  p.by_splits(outer, split, blockIdx.x);
  p.by_groups(outer, group, outer);
  p.by_heads_kv(batch, kv_head, outer);
  const int heads = p.heads / p.heads_kv;

  const int key0 = warp / Logits::kColumnWarps * kLogitRows, query0 = warp % Logits::kColumnWarps * kLogitColumns;
  const int own_key0 = warp / ByKey::kColumnWarps * kKeyRows, own_element0 = warp % ByKey::kColumnWarps * kKeyColumns;
  const int own_query0 = warp / ByQuery::kColumnWarps * kQueryRows;
  const int query_element0 = warp % ByQuery::kColumnWarps * kQueryColumns;

  for (int tile = split; tile < p.tiles; tile += p.splits) {
    __syncthreads();  // the last tile's tables have been used
    if (!plan_keys<Traits>(p, tile, group, shared)) continue;
    __syncthreads();
    const TokenBox& box = shared.box;
    for (int row = threadIdx.x; row < kMostQueries; row += kThreads) {
      shared.rows.fill(row, p.q_tile_tokens, p.axis[1].by_q_tile, p.axis[2].by_q_tile, box.pitch);
    }
    const auto key_row = [&](int head_dim) {
      return (batch * p.keys * p.heads_kv + kv_head) * static_cast<std::int64_t>(head_dim);
    };
    const auto load_keys = [&](std::uint32_t destination, const void* data, int head_dim) {
      const int head_bytes = head_dim * static_cast<int>(sizeof(Element));
      Gather<Tile, kKeys, kThreads>().copy_tokens(
          destination, static_cast<const char*>(data) + key_row(head_dim) * sizeof(Element), p.heads_kv * head_bytes,
          head_bytes, [&](int row) { return shared.row_windows[row][0].w; });
    };
    load_keys(k, p.key, p.head_dim);
    load_keys(v, p.value, p.head_dim_v);
    commit_copies();
    __syncthreads();
    const QueryColumnMask column_mask(shared.mask_words, p.axis);
    column_mask.template build<kMostQueries>(p.axis, warp, Traits::kWarps);

    float d_key[kKeyRows / 16][kKeyColumns / 8][4] = {}, d_value[kKeyRows / 16][kKeyColumns / 8][4] = {};
    const bool is_seen = box.begin.x < box.end.x && box.begin.y < box.end.y && box.begin.z < box.end.z;
    QueryStep step{QueryWalk(box.begin), 0, is_seen ? 0 : heads};
    int stage = 0;
    if (step.head < heads) load_queries<Traits>(p, shared, step, batch, kv_head * heads + step.head, 0);
    while (step.head < heads) {
      wait_copies<0>();
      __syncthreads();  // these queries are there; what the last step wrote has been used
      if (kStages == 2) {
        QueryStep next = step;
        next.next(p, box, kQueries);
        if (next.head < heads) load_queries<Traits>(p, shared, next, batch, kv_head * heads + next.head, stage ^ 1);
      }
      const std::uint32_t q = shared_address(shared.q[stage]), d_out = shared_address(shared.d_out[stage]);
      const QueryWalk& at = step.walk;
      if (threadIdx.x < kQueries) {
        const int row = step.column + threadIdx.x;
        const bool exists = shared.rows.is_visible(box.end, at.x, at.y, at.z, row, p.q_tile_tokens);
        shared.query_tokens[threadIdx.x] = exists ? box.token(at.x, at.y, at.z) + shared.rows.token(row) : -1;
      }

      if (Traits::kLogitWarps == Traits::kWarps || warp < Traits::kLogitWarps) {
        float s[kLogitRows / 16][kLogitColumns / 8][4] = {}, d_weight[kLogitRows / 16][kLogitColumns / 8][4] = {};
        // Before the products, behind which the vote would wait for shared memory.
        bool is_large = false;
        CUTE_UNROLL
        for (int first = 0; first < kLogitColumns; first += 32) {
          is_large |= has_remainder<Element>(shared.logsumexp[stage][query0 + first + lane % min(kLogitColumns, 32)]);
        }
        const bool any_large = __any_sync(0xffffffffu, is_large);
        const auto multiply = [&](auto& c, std::uint32_t a_tile, std::uint32_t b_tile) __attribute__((always_inline)) {
          const typename Product::template ReadA<Tile> read_a(a_tile, key0);
          const typename Product::template ReadB<Tile> read_b(b_tile, query0);
          accumulate<Product, kLogitRows / 16, kLogitColumns / 16, kHeadDim / kStep, true>(
              c, [&](auto& a, int m, int i) __attribute__((always_inline)) { read_a(a, 16 * m, i); },
              [&](auto& b, int n, int i) __attribute__((always_inline)) { read_b(b, 16 * n, i); });
        };
        multiply(s, k, q);
        float exponent_scale = p.scale * kLog2E;
        // Where logits are large, they become exponents here, and nothing is left to multiply or to add below. A
        // branch, since tiles that need no remainders would wait for those of others.
        if (any_large) {
          // A loop in which logits take turns to be the first ones: code for all of them would keep registers from the
          // rest.
#pragma unroll 1
          for (int n = 0; n < kLogitColumns / 8; ++n) {
            float exponents[kLogitRows / 16][4];
            CUTE_UNROLL
            for (int i = 0; i < 2; ++i) {
              const int column = query0 + 8 * n + 2 * lane4 + i, row = step.column + column;
              const float logsumexp = shared.logsumexp[stage][column];
              float remainder = 0.f;
              if (p.remainder != nullptr && has_remainder<Element>(logsumexp) &&
                  shared.rows.is_visible(box.end, at.x, at.y, at.z, row, p.q_tile_tokens)) {
                const std::int64_t token = box.token(at.x, at.y, at.z) + shared.rows.token(row);
                remainder = p.remainder[(batch * p.queries + token) * p.heads + kv_head * heads + step.head];
              }
              CUTE_UNROLL
              for (int m = 0; m < kLogitRows / 16; ++m) {
                CUTE_UNROLL
                for (int e = i; e < 4; e += 2) {
                  exponents[m][e] =
                      exponent_of_large(s[m][0][e], exponent_scale, base2_logsumexp(logsumexp), remainder);
                }
              }
            }
            CUTE_UNROLL
            for (int m = 0; m < kLogitRows / 16; ++m) {
              CUTE_UNROLL
              for (int e = 0; e < 4; ++e) {
                CUTE_UNROLL
                for (int j = 1; j < kLogitColumns / 8; ++j) s[m][j - 1][e] = s[m][j][e];
                s[m][kLogitColumns / 8 - 1][e] = exponents[m][e];
              }
            }
          }
          exponent_scale = 1.f;
        }
        CUTE_UNROLL
        for (int n = 0; n < kLogitColumns / 8; ++n) {
          const float2 lse = *reinterpret_cast<const float2*>(&shared.logsumexp[stage][query0 + 8 * n + 2 * lane4]);
          const float shift[2] = {any_large ? 0.f : base2_logsumexp(lse.x), any_large ? 0.f : base2_logsumexp(lse.y)};
          CUTE_UNROLL
          for (int m = 0; m < kLogitRows / 16; ++m) {
            CUTE_UNROLL
            for (int e = 0; e < 4; ++e) s[m][n][e] = fast_exp2(s[m][n][e] * exponent_scale - shift[e % 2]);
          }
        }
        multiply(d_weight, v, d_out);  // the compiler puts exponential functions between its instructions
        const bool is_whole =
            step.column + kQueries <= p.q_tile_tokens && at.is_inside(p.axis, shared.inner_begin, shared.inner_end);
        CUTE_UNROLL
        for (int n = 0; n < kLogitColumns / 8; ++n) {
          const float2 delta = *reinterpret_cast<const float2*>(&shared.delta[stage][query0 + 8 * n + 2 * lane4]);
          CUTE_UNROLL
          for (int m = 0; m < kLogitRows / 16; ++m) {
            CUTE_UNROLL
            for (int e = 0; e < 4; ++e) d_weight[m][n][e] -= e % 2 == 0 ? delta.x : delta.y;
          }
        }
        if (!is_whole) {
          // A loop, since the compiler would predicate instructions that it could jump over.
          const int4 first = make_int4(at.x, at.y, at.z, 0);
          std::uint32_t visible[kLogitRows / 8];
#pragma unroll 1
          for (int i = kLogitRows / 8 - 1; i >= 0; --i) {
            CUTE_UNROLL
            for (int j = kLogitRows / 8 - 1; j > 0; --j) visible[j] = visible[j - 1];
            const int4* seen = shared.row_windows[key0 + lane / 4 + 8 * i];
            visible[0] = column_mask.row(p.axis, seen[0], seen[1], first, lane4) >> (step.column + query0) / 4;
          }
          CUTE_UNROLL
          for (int i = 0; i < kLogitRows / 8; ++i) {
            CUTE_UNROLL
            for (int e = 0; e < kLogitColumns / 4; ++e) {
              if (!(visible[i] & 1u << e)) s[i / 2][e / 2][i % 2 * 2 + e % 2] = 0.f;
            }
          }
        }
        CUTE_UNROLL
        for (int i = 0; i < kLogitRows / 8; ++i) {
          const int row = key0 + lane / 4 + 8 * i;
          CUTE_UNROLL
          for (int n = 0; n < kLogitColumns / 8; ++n) {
            const int byte = (query0 + 8 * n + 2 * lane4) * static_cast<int>(sizeof(Element));
            const std::uint32_t offset = WeightTile::offset(row, byte / 16) + byte % 16;
            const float* w = &s[i / 2][n][i % 2 * 2];
            const float* d = &d_weight[i / 2][n][i % 2 * 2];
            Product::store_pair(weights + offset, w[0], w[1]);
            Product::store_pair(d_logits + offset, w[0] * d[0], w[1] * d[1]);
          }
        }
      }
      __syncthreads();  // weights and gradients of the logits are there

      const auto multiply_by_key = [&](auto& c, std::uint32_t a_tile,
                                       std::uint32_t b_tile) __attribute__((always_inline)) {
        const typename Product::template ReadPairedA<WeightTile> read_a(a_tile, own_key0);
        const typename Product::template ReadTransposedB<Tile> read_b(b_tile, own_element0);
        accumulate<Product, kKeyRows / 16, kKeyColumns / 16, kQueries / kStep>(
            c, [&](auto& a, int m, int i) __attribute__((always_inline)) { read_a(a, 16 * m, i); },
            [&](auto& b, int n, int i) __attribute__((always_inline)) { read_b(b, 16 * n, i); });
      };
      multiply_by_key(d_value, weights, d_out);
      multiply_by_key(d_key, d_logits, q);
      if (kStages == 1) {
        __syncthreads();  // the queries have been used
        QueryStep next = step;
        next.next(p, box, kQueries);
        if (next.head < heads) load_queries<Traits>(p, shared, next, batch, kv_head * heads + next.head, 0);
      }
      {
        float d_query[kQueryRows / 16][kQueryColumns / 8][4] = {};
        const typename Product::template ReadTransposedA<WeightTile> read_a(d_logits, own_query0);
        const typename Product::template ReadTransposedB<Tile> read_b(k, query_element0);
        accumulate<Product, kQueryRows / 16, kQueryColumns / 16, kKeys / kStep>(
            d_query, [&](auto& a, int m, int i) __attribute__((always_inline)) { read_a(a, 16 * m, i); },
            [&](auto& b, int n, int i) __attribute__((always_inline)) { read_b(b, 16 * n, i); });
        float* sums = p.query_gradient + batch * p.query_gradient_batch +
                      (kv_head * heads + step.head) * p.query_gradient_head + query_element0 + 2 * lane4;
        CUTE_UNROLL
        for (int i = 0; i < kQueryRows / 8; ++i) {
          const int token = shared.query_tokens[own_query0 + lane / 4 + 8 * i];
          if (token < 0) continue;
          float* of_token = sums + token * p.query_gradient_token;
          CUTE_UNROLL
          for (int n = 0; n < kQueryColumns / 8; ++n) {
            const float* pair = &d_query[i / 2][n][i % 2 * 2];
            if (query_element0 + 8 * n < p.head_dim) {
              add_pair(of_token + 8 * n, pair[0] * p.query_gradient_scale, pair[1] * p.query_gradient_scale);
            }
          }
        }
      }
      step.next(p, box, kQueries);
      if (kStages == 2) stage ^= 1;
    }

    const auto write = [&](void* data, const auto& gradient, int head_dim, float scale) {
      CUTE_UNROLL
      for (int i = 0; i < kKeyRows / 8; ++i) {
        const int token = shared.row_windows[own_key0 + lane / 4 + 8 * i][0].w;
        if (token < 0) continue;
        Element* row =
            static_cast<Element*>(data) + key_row(head_dim) + static_cast<std::int64_t>(token) * p.heads_kv * head_dim;
        CUTE_UNROLL
        for (int n = 0; n < kKeyColumns / 8; ++n) {
          const int element = own_element0 + 8 * n;
          const float* pair = &gradient[i / 2][n][i % 2 * 2];
          if (element < head_dim) write_pair(row + element + 2 * lane4, pair[0] * scale, pair[1] * scale);
        }
      }
    };
    write(p.key_gradient, d_key, p.head_dim, p.scale);
    write(p.value_gradient, d_value, p.head_dim_v, 1.f);
  }
  wait_copies<0>();
}

}  // namespace natten_jax::sm80
