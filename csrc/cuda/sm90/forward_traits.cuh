// The forms of the forward kernel: its products, its shared memory and its barriers.
#pragma once

#include "cuda/common/column_mask.cuh"
#include "cuda/sm90/forms.h"
#include "cuda/sm90/tile_plan.cuh"
#include "cuda/sm90/wgmma.cuh"

namespace natten_jax::sm90 {

/// What each warp of the first warpgroup does. Of those that load, one thread does.
enum ForwardWarp { kLoadsQueriesAndKeys, kPlansTiles, kLoadsValues, kStoresTiles };
constexpr int kLoadingThreads = 2;

// How a key/value tile is masked for a warpgroup, two bits each.
constexpr int kNoMask = 0;
constexpr int kWindowMask = 1;
constexpr int kEndMask = 2;  // additional tokens: columns past the tile or the last one
constexpr int kHidden = 3;   // none of its rows sees any of the tile
constexpr int kMaskBits = 2;
constexpr int kEachWarpgroup = 1 | 1 << kMaskBits | 1 << 2 * kMaskBits;  // times a mask: the same for all

// Named barriers; the first eight are CUTLASS's own.
constexpr int kProductOrder = 8;                               // one per warpgroup: it may issue its products
constexpr int kOutputReady = kProductOrder + kMostWarpgroups;  // the warpgroups have written their rows
constexpr int kMaskReady = kOutputReady + 1;

template <class Element_, int kHeadDim_, int kColumns_, int kWarpgroups_, bool kPingPong_, bool kIsNarrow_,
          bool kHasKeyBias_ = false, bool kIsPlain_ = false>
struct ForwardTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;  // at least head_dim and head_dim_v
  static constexpr int kColumns = kColumns_;  // keys of a tile
  static constexpr int kStages = 2;
  static constexpr int kPlans = 3;                  // query tiles that are planned, under way or on their way out
  static constexpr int kWarpgroups = kWarpgroups_;  // that compute
  static constexpr int kRows = 64 * kWarpgroups;    // queries of a tile
  static constexpr int kConsumers = kWarpgroup * kWarpgroups, kThreads = kWarpgroup + kConsumers;
  static constexpr int kLoadedHeadDim = kHeadDim;   // elements of a row of a tile
  static constexpr int kValueReaders = kConsumers;  // threads that a value tile waits for
  // Whether keys have biases (key_bias.cuh). The warp that loads values then does so whole, as it also loads these.
  static constexpr bool kHasKeyBias = kHasKeyBias_;
  // Numbers of a tile's biases in shared memory: those of each of the four lanes that share a row, and four that keep
  // them in other banks than the next lane's.
  static constexpr int kLaneBiases = kColumns / 4 + 4, kTileBiases = 4 * kLaneBiases;
  static constexpr int kBiasStages = kStages + 2;  // tiles whose biases are there, or on their way
  // Whether the problem has nothing that a planning or loading warp would look at for each tile
  // (ForwardParams::is_plain): these warps have 40 registers, and spill with all that there may be.
  static constexpr bool kIsPlain = kIsPlain_;
  static constexpr int kValueLoaders = kHasKeyBias ? kWarp : 1;
  // Threads that a plan waits for, of whom a warp stores.
  static constexpr int kPlanReaders = kConsumers + kValueLoaders + kLoadingThreads - 1 + kWarp;
  // What the 65536 registers of a multiprocessor give each thread. The warp that loads biases, too, needs more than
  // others; of three warpgroups that compute, these would spill in its place.
  static constexpr int kConsumerRegisters = kWarpgroups == 2 ? (kHasKeyBias ? 224 : 232) : 160;
  static constexpr int kServiceRegisters = kWarpgroups == 2 ? (kHasKeyBias ? 56 : 40) : 32;
  // Whether the warpgroups issue their products one after the other, or unordered.
  static constexpr bool kPingPong = kPingPong_;
  // Whether heads of queries and keys take fewer steps than the form's.
  static constexpr bool kIsNarrow = kIsNarrow_;
  // Three warpgroups lack the registers, wide heads the shared memory for an output tile of its own, too.
  static constexpr bool kQueryInRegisters = kHeadDim <= 128 && kWarpgroups == 2;
  static constexpr bool kSeparateOutput = kHeadDim <= kLargestContinuedHeadDim;

  using LayoutQ = decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<Element>{}, Shape<Int<kRows>, Int<kHeadDim>>{}));
  using LayoutK = decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<Element>{},
                                         Shape<Int<kColumns>, Int<kHeadDim>, Int<kStages>>{}));
  // A value tile is loaded as [token][head_dim]; the second product reads it with head_dim as its row.
  using LayoutVt = decltype(tile_to_shape(GMMA::Layout_MN_SW128_Atom<Element>{},
                                          Shape<Int<kHeadDim>, Int<kColumns>, Int<kStages>>{}, Step<_2, _1, _3>{}));

  static constexpr auto query_key_product() {
    using Tile = Shape<_64, Int<kColumns>, Int<kHeadDim>>;
    constexpr auto kMajor = GMMA::Major::K;
    if constexpr (kQueryInRegisters) {
      return make_tiled_mma(GMMA::rs_op_selector<Element, Element, float, Tile, kMajor, kMajor>());
    } else {
      return make_tiled_mma(GMMA::ss_op_selector<Element, Element, float, Tile, kMajor, kMajor>());
    }
  }
  static constexpr auto weight_value_product() {
    using Tile = Shape<_64, Int<kHeadDim>, Int<kColumns>>;
    return make_tiled_mma(GMMA::rs_op_selector<Element, Element, float, Tile, GMMA::Major::K, GMMA::Major::MN>());
  }

  /// Where the output tile is before it is stored.
  template <class Shared>
  CUTE_DEVICE static auto* output_tile(Shared& shared) {
    return kSeparateOutput ? shared.o : shared.q;
  }
  /// Initialises the barriers that not all forms have.
  template <class Shared>
  CUTE_DEVICE static void init_more_barriers(Shared& shared) {
    if constexpr (kHasKeyBias) {
      for (int i = 0; i < kBiasStages; ++i) ClusterBarrier::init(&shared.full_biases[i], kWarp);
    }
  }

  struct SharedStorage {
    alignas(1024) Element q[cosize_v<LayoutQ>];
    alignas(1024) Element k[cosize_v<LayoutK>];
    alignas(1024) Element v[cosize_v<LayoutVt>];
    alignas(1024) Element o[kSeparateOutput ? cosize_v<LayoutQ> : kChunk];
    float2 earlier[kSeparateOutput ? kRows : 1];  // where a launch continues another: logsumexp and remainder of a row
    TilePlan plan[kPlans];
    // The tile in a key buffer: its first key (x, y, z) and how it is masked. Additional tokens have as z their number
    // less that of the tile's: nobody then looks for a minimum in the loop of the warpgroups, all of whose registers
    // are used.
    int4 tile[kStages];
    std::uint32_t mask_words[KeyColumnMask::capacity(kColumns)];
    alignas(8) std::uint64_t first_key_loaded, full_q, empty_q, empty_o;
    std::uint64_t full_plan[kPlans], full_windows[kPlans], empty_plan[kPlans];
    std::uint64_t full_k[kStages], empty_k[kStages], full_v[kStages], empty_v[kStages];
    std::uint64_t full_biases[kHasKeyBias ? kBiasStages : 1];
    alignas(kHasKeyBias ? 16 : 4) float key_bias[kHasKeyBias ? kBiasStages : 1][kHasKeyBias ? kTileBiases : 1];
    int bias_places[kHasKeyBias ? kColumns : 1];
  };
};

}  // namespace natten_jax::sm90
