// The forms of the backward kernel: how its warpgroups share the work, its shared memory and its barriers.
#pragma once

#include "cuda/common/column_mask.cuh"
#include "cuda/sm90/backward_plan.cuh"
#include "cuda/sm90/wgmma.cuh"

namespace natten_jax::sm90 {

constexpr int kConsumers = 2 * kWarpgroup;  // threads that compute
constexpr int kThreads = kWarpgroup + kConsumers;
constexpr int kConsumerWarps = kConsumers / kWarp;
/// What each warp of the first warpgroup does. Of the first one, one thread does, and of the last one, unless key/value
/// tiles take turns.
enum BackwardWarp { kLoadsQueries, kPlansKeys, kLoadsStatistics, kStoresGradients };
// What is special about a query tile.
constexpr int kIsMasked = 1;   // some key is hidden from some query
constexpr int kIsLarge = 2;    // weights of some query need the remainder of its logsumexp
constexpr int kSumChunk = 32;  // elements of a 128-byte swizzled row of the query gradient's sums

// Named barriers; the first eight are CUTLASS's own.
constexpr int kTablesReady = 8;
constexpr int kScoresReady = 9;     // both warpgroups have written the gradients of their logits
constexpr int kScoresRead = 10;     // neither warpgroup reads them any more
constexpr int kGradientsDone = 11;  // both warpgroups have read what the gradients take the place of
constexpr int kBiasSumsReady = 12;  // one warpgroup has written, or the other read, its sums for biases of keys

template <class Element_, int kHeadDim_, int kKeys_, int kQueries_, int kStages_, bool kIsNarrow_,
          bool kHasKeyBias_ = false, bool kIsPlain_ = false>
struct BackwardTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;  // at least head_dim and head_dim_v
  static constexpr int kKeys = kKeys_;        // keys of a tile
  static constexpr int kQueries = kQueries_;  // queries of a tile
  static constexpr int kStages = kStages_;
  static constexpr int kThreads = sm90::kThreads;
  // Whether heads of queries and keys, or those of values, take fewer steps than the form's.
  static constexpr bool kIsNarrow = kIsNarrow_;
  static constexpr bool kHasKeyBias = kHasKeyBias_;  // key_bias.cuh
  static constexpr bool kIsPlain = kIsPlain_;        // as in ForwardTraits
  // Whether the warpgroups own different keys, so that registers hold the operands of key and value gradients.
  static constexpr bool kSplitsKeys = kKeys == 128;
  // Whether one warpgroup computes a tile's query gradient and the other the next one's.
  static constexpr bool kAlternates = kHeadDim == 64;
  // Whether query tiles are loaded by the warp that loads their statistics, not by the thread that loads the output
  // cotangent's. Where all have one buffer, everything waits for them: one thread takes 9% longer (H200, heads of 256).
  static constexpr bool kLoadsApart = kStages == 1;
  static constexpr int kScoreBuffers = kSplitsKeys ? 2 : 1;
  // The CTA is launched with 168 registers a thread, which are shared out anew. The warps that load spill 24 (H200: 3%
  // slower with heads of 256), but of the form for 128 the warpgroups that compute would spill (25% slower).
  static constexpr int kMoverRegisters = kHeadDim == 128 ? 24 : 40;
  static constexpr int kConsumerRegisters = (168 * kThreads - kWarpgroup * kMoverRegisters) / kConsumers;

  // Tiles are [token][head_dim] or [key][query]; products read them in rows or, transposed, in columns.
  template <int kRows, int kColumns, int kBuffers>
  using Rows =
      decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<Element>{}, Shape<Int<kRows>, Int<kColumns>, Int<kBuffers>>{}));
  template <int kRows, int kColumns, int kBuffers>
  using Columns = decltype(tile_to_shape(GMMA::Layout_MN_SW128_Atom<Element>{},
                                         Shape<Int<kColumns>, Int<kRows>, Int<kBuffers>>{}, Step<_2, _1, _3>{}));

  static constexpr auto kv_product() {
    constexpr auto kRowsFirst = GMMA::Major::MN, kRowsLast = GMMA::Major::K;
    if constexpr (kSplitsKeys) {
      using Tile = Shape<_64, Int<kHeadDim>, Int<kQueries>>;
      return make_tiled_mma(GMMA::rs_op_selector<Element, Element, float, Tile, kRowsLast, kRowsFirst>());
    } else {
      using Tile = Shape<_64, Int<kHeadDim / 2>, Int<kQueries>>;
      return make_tiled_mma(GMMA::ss_op_selector<Element, Element, float, Tile, kRowsLast, kRowsFirst>());
    }
  }

  static_assert(2 * kKeys * kHeadDim <= kScoreBuffers * kKeys * kQueries + 2 * kQueries * kHeadDim);

  struct SharedStorage {
    alignas(1024) Element k[kKeys * kHeadDim];
    alignas(1024) Element v[kKeys * kHeadDim];
    alignas(1024) Element q[kStages][kQueries * kHeadDim];
    alignas(1024) Element out_cotangent[kStages][kQueries * kHeadDim];
    alignas(1024) Element weights[kSplitsKeys ? kChunk : kKeys * kQueries];
    alignas(1024) Element score_gradient[kScoreBuffers][kKeys * kQueries];
    alignas(1024) float query_gradient[kQueries * kHeadDim];
    KeyTilePlan<kKeys> plan[2];
    // A query tile's first query (x, y, z), and bits of what is special about it.
    int4 tile[kStages];
    alignas(16) float logsumexp[kStages][kQueries];  // in base 2; infinite where there is no query
    alignas(16) float remainder[kStages][kQueries];  // of the logsumexp, where the tile is large
    alignas(16) float delta[kStages][kQueries];
    uchar4 row_coordinates[kKeys];        // of a row in the key/value tile: x, y, z
    uchar4 column_coordinates[kQueries];  // of a column in the query tile
    Origin origins[6];
    EntryLayout::Kept layout;
    std::uint32_t mask_words[QueryColumnMask::capacity(kQueries)];
    alignas(8) std::uint64_t full_k, full_v, empty_kv, full_gradients, empty_gradients;
    std::uint64_t full_sums, empty_sums, wants_plan;
    std::uint64_t full_plan[2], full_windows[2], empty_plan[2];
    std::uint64_t full_q[kStages], empty_q[kStages], full_out_cotangent[kStages], empty_out_cotangent[kStages];
    float bias_sums[kHasKeyBias && !kSplitsKeys ? kKeys : 1];

    // Once a key/value tile is done, its gradients take the place of those of logits and query.
    CUTE_DEVICE Element* key_gradient() {
      return reinterpret_cast<Element*>(reinterpret_cast<char*>(this) + offsetof(SharedStorage, score_gradient));
    }
    CUTE_DEVICE Element* value_gradient() { return key_gradient() + kKeys * kHeadDim; }
  };
};

/// The maps of batch entries, or null: those of the launch are all that there are.
template <class Traits>
CUTE_DEVICE const CUtensorMap* entry_maps(const BackwardParams& p) {
  return Traits::kIsPlain ? nullptr : p.entry_maps;
}

}  // namespace natten_jax::sm90
