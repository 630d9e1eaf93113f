// Forms of the backward kernel: the division of work between its warpgroups, its shared memory and barriers.
#pragma once

#include "cuda/common/column_mask.cuh"
#include "cuda/sm90/backward_plan.cuh"
#include "cuda/sm90/wgmma.cuh"

namespace natten_jax::sm90 {

constexpr int kConsumers = 2 * kWarpgroup;  // threads of the two consumer warpgroups
constexpr int kThreads = kWarpgroup + kConsumers;
constexpr int kConsumerWarps = kConsumers / kWarp;
/// Role of each warp of the first warpgroup. A single thread works in the first warp, and also in the last warp unless
/// key/value tiles take turns.
enum BackwardWarp { kLoadsQueries, kPlansKeys, kLoadsStatistics, kStoresGradients };
// Flags of a query tile.
constexpr int kIsMasked = 1;   // some key is hidden from some query
constexpr int kIsLarge = 2;    // weights of some query need its logsumexp's remainder
constexpr int kSumChunk = 32;  // elements per 128-byte swizzled row of the dQ sums

// Named barriers; CUTLASS reserves the first eight.
constexpr int kTablesReady = 8;
constexpr int kScoresReady = 9;     // both warpgroups have written their part of dS
constexpr int kScoresRead = 10;     // both warpgroups have finished reading dS
constexpr int kGradientsDone = 11;  // both warpgroups have read the buffers that dK and dV overwrite
constexpr int kBiasSumsReady = 12;  // a warpgroup has written, or the other one read, the key bias sums

template <class Element_, int kHeadDim_, int kKeys_, int kQueries_, int kStages_, bool kIsNarrow_,
          bool kHasKeyBias_ = false, bool kIsPlain_ = false>
struct BackwardTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;  // at least head_dim and head_dim_v
  static constexpr int kKeys = kKeys_;        // keys of a tile
  static constexpr int kQueries = kQueries_;  // queries of a tile
  static constexpr int kStages = kStages_;
  static constexpr int kThreads = sm90::kThreads;
  // True if heads of Q and K, or heads of V, take fewer k-steps than the form has.
  static constexpr bool kIsNarrow = kIsNarrow_;
  static constexpr bool kHasKeyBias = kHasKeyBias_;  // key_bias.cuh
  static constexpr bool kIsPlain = kIsPlain_;        // as in ForwardTraits
  // True if the warpgroups own different keys, so that registers hold the operands of dK and dV.
  static constexpr bool kSplitsKeys = kKeys == 128;
  // True if the warpgroups alternate: one computes a query tile's dQ, the other one the next tile's.
  static constexpr bool kAlternates = kHeadDim == 64;
  // True if the warp that loads statistics also loads query tiles, instead of the thread that loads dO. With a single
  // stage, everything waits for these loads: one thread for both takes 9% longer (H200, heads of 256).
  static constexpr bool kLoadsApart = kStages == 1;
  static constexpr int kScoreBuffers = kSplitsKeys ? 2 : 1;
  // The CTA is launched with 168 registers per thread, which are then redistributed. Producer warps with 24 registers
  // spill (H200: 3% slower with heads of 256), but otherwise the consumers of the form for 128 would spill (25%
  // slower).
  static constexpr int kMoverRegisters = kHeadDim == 128 ? 24 : 40;
  static constexpr int kConsumerRegisters = (168 * kThreads - kWarpgroup * kMoverRegisters) / kConsumers;

  // Tiles are [token][head_dim] or [key][query]; products read their rows or, transposed, their columns.
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
    // Per stage: first query (x, y, z) and flags (w) of the query tile.
    int4 tile[kStages];
    alignas(16) float logsumexp[kStages][kQueries];  // in base 2; infinite for rows without a query
    alignas(16) float remainder[kStages][kQueries];  // of the logsumexp, if the tile is large
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

    // When a key/value tile is done, dK and dV overwrite dS and dQ.
    CUTE_DEVICE Element* key_gradient() {
      return reinterpret_cast<Element*>(reinterpret_cast<char*>(this) + offsetof(SharedStorage, score_gradient));
    }
    CUTE_DEVICE Element* value_gradient() { return key_gradient() + kKeys * kHeadDim; }
  };
};

/// Maps of batch entries; null if all entries use the maps of the launch.
template <class Traits>
CUTE_DEVICE const CUtensorMap* entry_maps(const BackwardParams& p) {
  return Traits::kIsPlain ? nullptr : p.entry_maps;
}

}  // namespace natten_jax::sm90
