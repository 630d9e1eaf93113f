// Forms of the forward kernel: its products, shared memory and barriers.
#pragma once

#include "cuda/common/column_mask.cuh"
#include "cuda/sm90/forms.h"
#include "cuda/sm90/tile_plan.cuh"
#include "cuda/sm90/wgmma.cuh"

namespace natten_jax::sm90 {

/// Role of each warp of the first warpgroup. In a loading warp, a single thread works.
enum ForwardWarp { kLoadsQueriesAndKeys, kPlansTiles, kLoadsValues, kStoresTiles };
constexpr int kLoadingThreads = 2;

// Mask modes of a key/value tile, two bits per warpgroup.
constexpr int kNoMask = 0;
constexpr int kWindowMask = 1;
constexpr int kEndMask = 2;  // additional tokens: hide columns past the tile or past the last token
constexpr int kHidden = 3;   // no row of the warpgroup sees a key of the tile
constexpr int kMaskBits = 2;
constexpr int kEachWarpgroup = 1 | 1 << kMaskBits | 1 << 2 * kMaskBits;  // times a mask: that mask for every warpgroup

// Named barriers; CUTLASS reserves the first eight.
constexpr int kProductOrder = 8;                               // per warpgroup: may issue its products
constexpr int kOutputReady = kProductOrder + kMostWarpgroups;  // the warpgroups have written their rows
constexpr int kMaskReady = kOutputReady + 1;

template <class Element_, int kHeadDim_, int kColumns_, int kWarpgroups_, bool kPingPong_, bool kIsNarrow_,
          bool kHasKeyBias_ = false, bool kIsPlain_ = false>
struct ForwardTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;  // at least head_dim and head_dim_v
  static constexpr int kColumns = kColumns_;  // keys of a tile
  static constexpr int kStages = 2;
  static constexpr int kPlans = 3;                  // query tiles in flight: planned, computed or stored
  static constexpr int kWarpgroups = kWarpgroups_;  // consumer warpgroups
  static constexpr int kRows = 64 * kWarpgroups;    // queries of a tile
  static constexpr int kConsumers = kWarpgroup * kWarpgroups, kThreads = kWarpgroup + kConsumers;
  static constexpr int kLoadedHeadDim = kHeadDim;   // elements per row of a tile
  static constexpr int kValueReaders = kConsumers;  // arrivals that release a value tile
  // True if keys have biases (key_bias.cuh). All lanes of the value-loading warp then work, because they also load the
  // biases.
  static constexpr bool kHasKeyBias = kHasKeyBias_;
  // Floats of a tile's biases in shared memory. Each of the four lanes that share a row reads a separate run, with four
  // floats of padding so that the runs lie in different banks.
  static constexpr int kLaneBiases = kColumns / 4 + 4, kTileBiases = 4 * kLaneBiases;
  static constexpr int kBiasStages = kStages + 2;  // tiles whose biases are loaded or in flight
  // True if the planning and loading warps can skip the special cases of each tile (ForwardParams::is_plain). These
  // warps have 40 registers and would spill with the general plan code.
  static constexpr bool kIsPlain = kIsPlain_;
  static constexpr int kValueLoaders = kHasKeyBias ? kWarp : 1;
  // Arrivals that release a plan, including all lanes of the storing warp.
  static constexpr int kPlanReaders = kConsumers + kValueLoaders + kLoadingThreads - 1 + kWarp;
  // Registers per thread, from the 65536 of an SM. The warp that loads biases needs more than the other producers.
  // Three consumer warpgroups cannot spare these registers: they would spill instead.
  static constexpr int kConsumerRegisters = kWarpgroups == 2 ? (kHasKeyBias ? 224 : 232) : 160;
  static constexpr int kServiceRegisters = kWarpgroups == 2 ? (kHasKeyBias ? 56 : 40) : 32;
  // True if the warpgroups issue their products one after the other, false if unordered.
  static constexpr bool kPingPong = kPingPong_;
  // True if Q and K heads take fewer k-steps than the form has.
  static constexpr bool kIsNarrow = kIsNarrow_;
  // Three warpgroups or wide heads lack the registers for Q. Wide heads also lack the shared memory for a separate
  // output tile.
  static constexpr bool kQueryInRegisters = kHeadDim <= 128 && kWarpgroups == 2;
  static constexpr bool kSeparateOutput = kHeadDim <= kLargestContinuedHeadDim;

  using LayoutQ = decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<Element>{}, Shape<Int<kRows>, Int<kHeadDim>>{}));
  using LayoutK = decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<Element>{},
                                         Shape<Int<kColumns>, Int<kHeadDim>, Int<kStages>>{}));
  // A value tile is loaded as [token][head_dim]; the second product reads its transpose, with head_dim as rows.
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

  /// Output tile in shared memory, read by the TMA store.
  template <class Shared>
  CUTE_DEVICE static auto* output_tile(Shared& shared) {
    return kSeparateOutput ? shared.o : shared.q;
  }
  /// Initialises the mbarriers that only some forms have.
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
    float2 earlier[kSeparateOutput ? kRows : 1];  // logsumexp and remainder of earlier launches, per row
    TilePlan plan[kPlans];
    // Per key stage: the tile's first key (x, y, z) and its masks (w). For additional tokens, z is their number minus
    // the number in the tile. This saves a min() in the consumer loop, which uses all its registers.
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
