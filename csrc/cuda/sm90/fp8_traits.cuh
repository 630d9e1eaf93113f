// Forms of the forward kernel for 8-bit floats: its products, shared memory and barriers.
#pragma once

#include "cuda/sm90/forward_traits.cuh"

namespace natten_jax::sm90 {

/// Exponents of e4m3 weights. The weight of a row's reference is 2^kWeightExponent, so that small weights are not
/// denormal. Weights may not exceed 2^kLargestExponent, because e4m3 saturates at 448. The difference is how far logits
/// may exceed the reference.
constexpr float kWeightExponent = 7.f, kLargestExponent = 8.75f;

template <int kHeadDim_, int kColumns_, bool kPingPong_>
struct Float8Traits {
  using Element = cutlass::float_e4m3_t;
  using OutElement = cutlass::bfloat16_t;     // or float16
  static constexpr int kHeadDim = kHeadDim_;  // at least head_dim and head_dim_v
  static constexpr int kColumns = kColumns_;  // keys of a tile
  // Rows of query, key and value tiles are whole swizzled rows; elements past the head are zero.
  static constexpr int kLoadedHeadDim = kHeadDim < 128 ? 128 : kHeadDim;
  static constexpr int kStages = kHeadDim <= 128 ? 3 : 2;
  static constexpr int kValueStages = 2;
  static constexpr int kPlans = 3;
  static constexpr int kWarpgroups = 2;           // consumer warpgroups
  static constexpr int kRows = 64 * kWarpgroups;  // queries of a tile
  static constexpr int kConsumers = kWarpgroup * kWarpgroups;
  static constexpr int kTurners = kWarpgroup;  // threads that transpose value tiles
  static constexpr int kThreads = kWarpgroup + kConsumers + kTurners;
  // Registers per thread, from the 65536 of an SM.
  static constexpr int kConsumerRegisters = kHeadDim <= 128 ? 208 : 224, kServiceRegisters = kHeadDim <= 128 ? 56 : 32;
  static constexpr int kTurnerRegisters = kHeadDim <= 128 ? 40 : 32;
  static constexpr bool kPingPong = kPingPong_;
  // In registers, Q would compete with the softmax for register ports: 4% slower with heads of 128 (H200).
  static constexpr bool kQueryInRegisters = kHeadDim <= 64;
  static constexpr bool kSeparateOutput = true;
  static constexpr int kValueReaders = kTurners;
  static constexpr bool kHasKeyBias = false, kIsPlain = false;
  static constexpr int kPlanReaders = kConsumers + kLoadingThreads + kWarp + kTurners;

  // The logits are a single product; the weighted values are a product per `kValuePart` columns. With heads of 128,
  // parts of 64 take a fifth more time (H200).
  static constexpr int kValuePart = kHeadDim == 128 ? 128 : 64;
  static constexpr int kValueParts = kHeadDim / kValuePart;
  static constexpr int kQuerySteps = kHeadDim / 32, kWeightSteps = kColumns / 32;

  using LayoutQ =
      decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<Element>{}, Shape<Int<kRows>, Int<kLoadedHeadDim>>{}));
  using LayoutK = decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<Element>{},
                                         Shape<Int<kColumns>, Int<kLoadedHeadDim>, Int<kStages>>{}));
  // Value tiles are loaded as [token][head_dim] and transposed in shared memory, because 8-bit wgmma operands must be
  // contiguous along the summed dimension.
  using TurnedAtom =
      std::conditional_t<kColumns == 128, GMMA::Layout_K_SW128_Atom<Element>, GMMA::Layout_K_SW64_Atom<Element>>;
  using LayoutTurned = decltype(tile_to_shape(TurnedAtom{}, Shape<Int<kHeadDim>, Int<kColumns>, Int<kValueStages>>{}));
  static_assert(kColumns == (kHeadDim <= 128 ? 128 : 64));

  static constexpr auto query_key_product() {
    if constexpr (kQueryInRegisters) {
      return make_tiled_mma(SM90::GMMA::MMA_64x128x32_F32E4M3E4M3_RS_TN<>{});
    } else if constexpr (kColumns == 128) {
      return make_tiled_mma(SM90::GMMA::MMA_64x128x32_F32E4M3E4M3_SS_TN<>{});
    } else {
      return make_tiled_mma(SM90::GMMA::MMA_64x64x32_F32E4M3E4M3_SS_TN<>{});
    }
  }
  static constexpr auto weight_value_product() {
    if constexpr (kValuePart == 128) {
      return make_tiled_mma(SM90::GMMA::MMA_64x128x32_F32E4M3E4M3_RS_TN<>{});
    } else {
      return make_tiled_mma(SM90::GMMA::MMA_64x64x32_F32E4M3E4M3_RS_TN<>{});
    }
  }

  template <class Shared>
  CUTE_DEVICE static auto* output_tile(Shared& shared) {
    return shared.o;
  }
  template <class Shared>
  CUTE_DEVICE static void init_more_barriers(Shared& shared) {
    for (int i = 0; i < kValueStages; ++i) {
      ClusterBarrier::init(&shared.full_turned[i], kTurners);
      ClusterBarrier::init(&shared.empty_turned[i], kConsumers);
    }
  }

  struct SharedStorage {
    alignas(1024) Element q[cosize_v<LayoutQ>];
    alignas(1024) Element k[cosize_v<LayoutK>];
    alignas(1024) Element v[kColumns * kLoadedHeadDim * kStages];
    alignas(1024) Element turned[cosize_v<LayoutTurned>];
    alignas(1024) OutElement o[kRows * kHeadDim];
    float2 earlier[1];
    TilePlan plan[kPlans];
    int4 tile[kStages];  // as in ForwardTraits
    std::uint32_t mask_words[KeyColumnMask::capacity(kColumns)];
    alignas(8) std::uint64_t first_key_loaded, full_q, empty_q, empty_o;
    std::uint64_t full_plan[kPlans], full_windows[kPlans], empty_plan[kPlans];
    std::uint64_t full_k[kStages], empty_k[kStages], full_v[kStages], empty_v[kStages];
    std::uint64_t full_turned[kValueStages], empty_turned[kValueStages];
  };
};

}  // namespace natten_jax::sm90
