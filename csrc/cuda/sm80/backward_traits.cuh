// Forms of the backward kernel: compiled variants, division of products between warps, and shared memory.
#pragma once

#include "cuda/common/column_mask.cuh"
#include "cuda/common/tile_walk.cuh"
#include "cuda/sm80/gather.cuh"
#include "cuda/sm80/params.h"

namespace natten_jax::sm80 {

constexpr int kMostQueries = 128;  // of a query tile

/// Division of the rows and columns of a product between warps.
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
  static constexpr int kStages = kStages_;    // query tiles in shared memory
  static constexpr bool kHasKeyBias = false;  // true in BackwardKeyBiased
  static constexpr int kWarps = KeyWarps::kRowWarps * KeyWarps::kColumnWarps;
  static constexpr int kLogitWarps = LogitWarps::kRowWarps * LogitWarps::kColumnWarps;
  static constexpr int kThreads = 32 * kWarps;
  static_assert(kLogitWarps <= kWarps);
  // Rows and columns per warp.
  static constexpr int kLogitRows = kKeys / LogitWarps::kRowWarps, kLogitColumns = kQueries / LogitWarps::kColumnWarps;
  static constexpr int kKeyRows = kKeys / KeyWarps::kRowWarps, kKeyColumns = kHeadDim / KeyWarps::kColumnWarps;
  static constexpr int kQueryRows = kQueries / QueryWarps::kRowWarps;
  static constexpr int kQueryColumns = kHeadDim / QueryWarps::kColumnWarps;
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
    TokenBox box;                 // queries that see any key
    int4 inner_begin, inner_end;  // queries that see every key
    TileRows<QueryCopy> rows;     // of query tiles
    int4 row_windows[kKeys][2];   // first query that sees the key (x, y, z) and its token, or -1; end of the queries
    std::uint32_t mask_words[QueryColumnMask::capacity(kMostQueries)];
  };
};

/// A few queries of a query tile, for one query head of the key/value head.
struct QueryStep {
  QueryWalk walk;
  int column;  // first row of the query tile
  int head;    // among the query heads that share the keys

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

/// The key/value head of a CTA.
struct KeyHead {
  int batch, head;
  int queries;      // query heads per key/value head
  bool has_scales;  // heads may have separate scales: a kernel constant, in no register

  CUTE_DEVICE KeyHead(const BackwardParams& p, int outer, bool has_scales)
      : queries(p.heads / p.heads_kv), has_scales(has_scales) {
    p.by_heads_kv(batch, head, outer);
  }

  /// Loads the scale at each use, because registers are scarce. Query heads with separate scales do not share a key
  /// head.
  CUTE_DEVICE HeadScale scale(const BackwardParams& p) const {
    if (!has_scales) return {p.scale.of_all, p.scale.of_all};
    return p.scale.of((batch * p.heads_kv + head) * queries);
  }

  /// Index of a step's query head among the arrays' heads.
  CUTE_DEVICE int query_head(const QueryStep& step) const { return head * queries + step.head; }

  /// First element of the head's keys or values.
  CUTE_DEVICE std::int64_t first(const BackwardParams& p, int head_dim) const {
    return (batch * p.keys * p.heads_kv + head) * static_cast<std::int64_t>(head_dim);
  }
};

}  // namespace natten_jax::sm80
