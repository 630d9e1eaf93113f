// Forms (compiled variants) of the backward kernel. A form defines tile sizes, how warps divide the products, and the
// contents of shared memory.
#pragma once

#include "cuda/common/column_mask.cuh"
#include "cuda/common/tile_walk.cuh"
#include "cuda/sm80/gather.cuh"
#include "cuda/sm80/params.h"

namespace natten_jax::sm80 {

constexpr int kMostQueries = 128;  // maximum tokens of a query tile

/// Grid of the warps that divide the result of a product: kRowWarps along the rows, kColumnWarps along the columns.
template <int kRowWarps_, int kColumnWarps_>
struct WarpGrid {
  static constexpr int kRowWarps = kRowWarps_, kColumnWarps = kColumnWarps_;
};

template <class Element_, class Product_, int kHeadDim_, int kKeys_, int kQueries_, int kStages_, class LogitWarps_,
          class KeyWarps_, class QueryWarps_>
struct BackwardTraits {
  using Element = Element_;
  using Product = Product_;
  using LogitWarps = LogitWarps_;  // for S^T and dP^T: rows are keys, columns are queries
  using KeyWarps = KeyWarps_;      // for dK and dV: rows are keys, columns are elements of the head
  using QueryWarps = QueryWarps_;  // for dQ: rows are queries, columns are elements of the head
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kKeys = kKeys_;
  static constexpr int kQueries = kQueries_;
  static constexpr int kStages = kStages_;    // number of steps whose queries fit into shared memory at a time
  static constexpr bool kHasKeyBias = false;  // true in BackwardKeyBiased
  static constexpr int kWarps = KeyWarps::kRowWarps * KeyWarps::kColumnWarps;
  static constexpr int kLogitWarps = LogitWarps::kRowWarps * LogitWarps::kColumnWarps;
  static constexpr int kThreads = 32 * kWarps;
  static_assert(kLogitWarps <= kWarps);
  // Number of rows and columns that a warp computes.
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
    int query_tokens[kQueries];   // token of each query of the step; -1 without a query
    TokenBox box;                 // queries that attend to any key of the tile
    int4 inner_begin, inner_end;  // queries that attend to every key of the tile
    TileRows<QueryCopy> rows;     // positions of the queries in a query tile
    // Per key: [0] first query that attends to the key (x, y, z) and, in w, the key's token or -1 without a key;
    // [1] end of the queries (x, y, z).
    int4 row_windows[kKeys][2];
    std::uint32_t mask_words[QueryColumnMask::capacity(kMostQueries)];
  };
};

/// A step: `kQueries` queries of a query tile and one of the query heads that share the key/value head.
struct QueryStep {
  QueryWalk walk;
  int column;  // index of the step's first query in the query tile
  int head;    // index among the query heads that share the key/value head

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

/// The key/value head that a CTA processes.
struct KeyHead {
  int batch, head;
  int queries;      // number of query heads per key/value head
  bool has_scales;  // true if heads may have separate scales; a compile-time constant, so it takes no register

  CUTE_DEVICE KeyHead(const BackwardParams& p, int outer, bool has_scales)
      : queries(p.heads / p.heads_kv), has_scales(has_scales) {
    p.by_heads_kv(batch, head, outer);
  }

  /// Scale of the query heads that share the key/value head: heads with separate scales never share one. Loaded at each
  /// use, because registers are scarce.
  CUTE_DEVICE HeadScale scale(const BackwardParams& p) const {
    if (!has_scales) return {p.scale.uniform, p.scale.uniform};
    return p.scale.for_head((batch * p.heads_kv + head) * queries);
  }

  /// Index of a step's query head among all heads of the arrays.
  CUTE_DEVICE int query_head(const QueryStep& step) const { return head * queries + step.head; }

  /// Index of the first element of the head's keys or values in the array.
  CUTE_DEVICE std::int64_t first(const BackwardParams& p, int head_dim) const {
    return (batch * p.keys * p.heads_kv + head) * static_cast<std::int64_t>(head_dim);
  }
};

}  // namespace natten_jax::sm80
