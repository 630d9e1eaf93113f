// Forms (compiled variants) of the backward kernel. A form defines tile sizes, the division of work between warpgroups,
// barriers, and the contents of shared memory.
#pragma once

#include "cuda/common/column_mask.cuh"
#include "cuda/sm90/backward_plan.cuh"
#include "cuda/sm90/wgmma.cuh"

namespace natten_jax::sm90 {

constexpr int kConsumers = 2 * kWarpgroup;  // number of threads of the two consumer warpgroups
constexpr int kThreads = kWarpgroup + kConsumers;
constexpr int kConsumerWarps = kConsumers / kWarp;
/// Role of each warp of the first warpgroup. Only one thread of warp kLoadsQueries does work. Only one thread of warp
/// kStoresGradients does work, unless key/value tiles take turns in adding to dQ (KeyTileSchedule).
enum BackwardWarp { kLoadsQueries, kPlansKeys, kLoadsStatistics, kStoresGradients };
// Flags of a query tile.
constexpr int kIsMasked = 1;  // the tile needs a mask: some query does not attend to some key
constexpr int kIsLarge = 2;   // some logsumexp is so large that weights need its remainder

constexpr int kSumChunk = 32;  // number of float32 elements in a swizzled row (128 bytes) of a dQ tile

// Named barriers. CUTLASS reserves the numbers below eight.
constexpr int kTablesReady = 8;
constexpr int kScoresReady = 9;     // both warpgroups have written their part of dS
constexpr int kScoresRead = 10;     // both warpgroups have finished reading dS
constexpr int kGradientsDone = 11;  // both warpgroups have read the buffers that dK and dV overwrite
constexpr int kBiasSumsReady = 12;  // one warpgroup has written bias_sums, or the other one has read them

template <class Element_, int kHeadDim_, int kKeys_, int kQueries_, int kStages_, bool kIsNarrow_,
          bool kHasKeyBias_ = false, bool kIsPlain_ = false>
struct BackwardTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;  // at least head_dim and head_dim_v
  static constexpr int kKeys = kKeys_;        // maximum keys of a key/value tile
  static constexpr int kQueries = kQueries_;  // maximum queries of a query tile
  static constexpr int kStages = kStages_;
  static constexpr int kThreads = sm90::kThreads;
  // True if the kernel supports heads of Q and K, or of V, that need fewer k-steps than heads of kHeadDim.
  static constexpr bool kIsNarrow = kIsNarrow_;
  static constexpr bool kHasKeyBias = kHasKeyBias_;  // true if the kernel adds key biases (backward_key_bias.cuh)
  static constexpr bool kIsPlain = kIsPlain_;        // as in ForwardTraits
  // True if the warpgroups compute different keys. Weights and dS are then register operands of the products for dV and
  // dK.
  static constexpr bool kSplitsKeys = kKeys == 128;
  // True if the warpgroups alternate in computing dQ: one of them computes the dQ of even query tiles, the other one
  // the dQ of odd query tiles.
  static constexpr bool kAlternates = kHeadDim == 64;
  // True if the warp that loads logsumexps and deltas also loads Q; false if the thread that loads dO also loads Q.
  // With a single stage, all warps wait for these loads: if one thread loaded both dO and Q, a pass took 9% longer
  // (H200, heads of 256).
  static constexpr bool kLoadsApart = kStages == 1;
  static constexpr int kScoreBuffers = kSplitsKeys ? 2 : 1;
  // The CTA is launched with 168 registers per thread. These are then redistributed between the warpgroups. With 24
  // registers, producer warps spill (heads of 256 are 3% slower on H200), so they get 40. In the form for heads of 128,
  // they get only 24, because otherwise the consumer warps would spill (25% slower).
  static constexpr int kMoverRegisters = kHeadDim == 128 ? 24 : 40;
  static constexpr int kConsumerRegisters = (168 * kThreads - kWarpgroup * kMoverRegisters) / kConsumers;

  // Layouts of a tile [token][head_dim] or [key][query] in shared memory. Rows is for products that read the tile as it
  // is, and Columns is for products that read it transposed.
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
    int4 tile[kStages];                              // x, y, z: first query of the query tile; w: flags of the tile
    alignas(16) float logsumexp[kStages][kQueries];  // in base 2; infinite for rows without a query
    alignas(16) float remainder[kStages][kQueries];  // remainders of the logsumexps, if the tile has flag kIsLarge
    alignas(16) float delta[kStages][kQueries];
    uchar4 row_coordinates[kKeys];        // coordinates x, y, z of each row in the key/value tile
    uchar4 column_coordinates[kQueries];  // coordinates x, y, z of each column in the query tile
    Origin origins[6];
    EntryLayout::Cache layout;
    std::uint32_t mask_words[QueryColumnMask::capacity(kQueries)];
    alignas(8) std::uint64_t full_k, full_v, empty_kv, full_gradients, empty_gradients;
    std::uint64_t full_sums, empty_sums, wants_plan;
    std::uint64_t full_plan[2], full_windows[2], empty_plan[2];
    std::uint64_t full_q[kStages], empty_q[kStages], full_out_cotangent[kStages], empty_out_cotangent[kStages];
    float bias_sums[kHasKeyBias && !kSplitsKeys ? kKeys : 1];

    // After the last query tile of a key/value tile, dK and dV overwrite the buffers of dS and dQ.
    CUTE_DEVICE Element* key_gradient() {
      return reinterpret_cast<Element*>(reinterpret_cast<char*>(this) + offsetof(SharedStorage, score_gradient));
    }
    CUTE_DEVICE Element* value_gradient() { return key_gradient() + kKeys * kHeadDim; }
  };
};

/// Tensor maps of the batch entries; null if all entries use the maps of the launch.
template <class Traits>
CUTE_DEVICE const CUtensorMap* entry_maps(const BackwardParams& p) {
  return Traits::kIsPlain ? nullptr : p.entry_maps;
}

}  // namespace natten_jax::sm90
