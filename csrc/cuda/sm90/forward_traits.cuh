// Forms (compiled variants) of the forward kernel. A form defines tile sizes, products, barriers, and the contents of
// shared memory.
#pragma once

#include "cuda/common/column_mask.cuh"
#include "cuda/sm90/forms.h"
#include "cuda/sm90/tile_plan.cuh"
#include "cuda/sm90/wgmma.cuh"

namespace natten_jax::sm90 {

/// Role of each warp of the first warpgroup. In a warp that loads tiles, only one thread does work. The exception is
/// warp kLoadsValues if keys have biases: all of its lanes then do work.
enum ForwardWarp { kLoadsQueriesAndKeys, kPlansTiles, kLoadsValues, kStoresTiles };
constexpr int kLoadingThreads = 2;

// Mask modes of a key/value tile for a warpgroup. The modes of all warpgroups are packed into one number, kMaskBits
// bits each.
constexpr int kNoMask = 0;
constexpr int kWindowMask = 1;
constexpr int kEndMask = 2;  // Tile with fewer additional tokens than columns: the other columns are masked out.
constexpr int kHidden = 3;   // No row of the warpgroup attends to a key of the tile.
constexpr int kMaskBits = 2;
// A mode times this number is the packed number with this mode for every warpgroup.
constexpr int kEachWarpgroup = 1 | 1 << kMaskBits | 1 << 2 * kMaskBits;

// Numbers of named barriers. CUTLASS reserves the numbers below eight.
constexpr int kProductOrder = 8;                               // One per warpgroup: the warpgroup may issue products.
constexpr int kOutputReady = kProductOrder + kMostWarpgroups;  // The warpgroups have written their output rows.
constexpr int kMaskReady = kOutputReady + 1;

template <class Element_, int kHeadDim_, int kColumns_, int kWarpgroups_, bool kPingPong_, bool kIsNarrow_,
          bool kHasKeyBias_ = false, bool kIsPlain_ = false>
struct ForwardTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;  // Upper bound of head_dim and head_dim_v.
  static constexpr int kColumns = kColumns_;  // Maximum number of keys of a key/value tile.
  static constexpr int kStages = 2;
  static constexpr int kPlans = 3;                  // Query tiles in flight at a time: planned, computed or stored.
  static constexpr int kWarpgroups = kWarpgroups_;  // Number of consumer warpgroups.
  static constexpr int kRows = 64 * kWarpgroups;    // Maximum number of queries of a query tile.
  static constexpr int kConsumers = kWarpgroup * kWarpgroups, kThreads = kWarpgroup + kConsumers;
  static constexpr int kLoadedHeadDim = kHeadDim;   // Elements per row of a tile in shared memory.
  static constexpr int kValueReaders = kConsumers;  // Number of arrivals that release a value tile.
  // True if the kernel adds key biases (key_bias.cuh). All lanes of warp kLoadsValues then do work, because they also
  // load the biases.
  static constexpr bool kHasKeyBias = kHasKeyBias_;
  // Number of floats in a buffer for the biases of a tile (kTileBiases). The buffer has kLaneBiases floats for each of
  // the four lanes that share a row. Of these, four floats are padding, so that the lanes read from different banks.
  static constexpr int kLaneBiases = kColumns / 4 + 4, kTileBiases = 4 * kLaneBiases;
  static constexpr int kBiasStages = kStages + 2;  // Number of buffers for the biases of a tile.
  // True if the kernel supports only plain problems (ForwardParams::is_plain). The warps that plan and load tiles then
  // contain no code for special cases. With that code, these warps would spill, because they have only 40 registers.
  static constexpr bool kIsPlain = kIsPlain_;
  static constexpr int kValueLoaders = kHasKeyBias ? kWarp : 1;
  // Number of arrivals that release a plan: all consumer threads, the threads that load tiles, and all lanes of the
  // warp that stores output.
  static constexpr int kPlanReaders = kConsumers + kValueLoaders + kLoadingThreads - 1 + kWarp;
  // Registers per thread. A CTA uses the 65536 registers of an SM. All producer warps get the same number. With two
  // consumer warpgroups, key biases increase this number, because the warp that loads biases needs more registers. With
  // three, they do not, because the consumers would otherwise spill.
  static constexpr int kConsumerRegisters = kWarpgroups == 2 ? (kHasKeyBias ? 224 : 232) : 160;
  static constexpr int kServiceRegisters = kWarpgroups == 2 ? (kHasKeyBias ? 56 : 40) : 32;
  // True if the warpgroups take turns in issuing their products (ProductOrder), false if they issue them in any order.
  static constexpr bool kPingPong = kPingPong_;
  // True if the kernel supports heads of Q and K that need fewer k-steps than heads of kHeadDim.
  static constexpr bool kIsNarrow = kIsNarrow_;
  // With three consumer warpgroups or heads wider than 128, there are too few registers for Q. With heads wider than
  // 128, there is also too little shared memory for a separate output tile.
  static constexpr bool kQueryInRegisters = kHeadDim <= 128 && kWarpgroups == 2;
  static constexpr bool kSeparateOutput = kHeadDim <= kLargestContinuedHeadDim;

  using LayoutQ = decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<Element>{}, Shape<Int<kRows>, Int<kHeadDim>>{}));
  using LayoutK = decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<Element>{},
                                         Shape<Int<kColumns>, Int<kHeadDim>, Int<kStages>>{}));
  // Layout of a transposed value tile. The tile is loaded as [token][head_dim], and the product with the weights reads
  // it as [head_dim][token].
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

  /// Output tile in shared memory, from which TMA stores it. It is the query tile unless `kSeparateOutput`.
  template <class Shared>
  CUTE_DEVICE static auto* output_tile(Shared& shared) {
    return kSeparateOutput ? shared.o : shared.q;
  }
  /// Initializes the mbarriers that only kernels with key biases have.
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
    float2 earlier[kSeparateOutput ? kRows : 1];  // per row: logsumexp and remainder of earlier launches
    TilePlan plan[kPlans];
    // Per stage of the key ring: first key (x, y, z) and mask modes (w) of the tile. For a tile of additional tokens, z
    // is instead the number of all additional tokens minus the number in the tile. This saves a min() in the consumer
    // loop, which has no spare registers.
    int4 tile[kStages];
    std::uint32_t mask_words[KeyColumnMask::capacity(kColumns)];
    alignas(8) std::uint64_t first_key_loaded, full_q, empty_q, empty_o;
    std::uint64_t full_plan[kPlans], full_windows[kPlans], empty_plan[kPlans];
    std::uint64_t full_k[kStages], empty_k[kStages], full_v[kStages], empty_v[kStages];
    std::uint64_t full_biases[kHasKeyBias ? kBiasStages : 1];
    alignas(kHasKeyBias ? 16 : 4) float key_bias[kHasKeyBias ? kBiasStages : 1][kHasKeyBias ? kTileBiases : 1];
    int bias_positions[kHasKeyBias ? kColumns : 1];
  };
};

}  // namespace natten_jax::sm90
