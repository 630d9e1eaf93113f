// The forms of the forward kernel for 8-bit floats: its products, its shared memory and its barriers.
#pragma once

#include "cuda/sm90/forward_traits.cuh"

namespace natten_jax::sm90 {

/// Weights are e4m3 numbers: those of a row's reference are 2 to this power, so that small ones are not denormal, and
/// none may exceed 2 to the other, as they saturate at 448. The distance is how far logits may exceed the reference.
constexpr float kWeightExponent = 7.f, kLargestExponent = 8.75f;

template <int kHeadDim_, int kColumns_, bool kPingPong_>
struct Float8Traits {
  using Element = cutlass::float_e4m3_t;
  using OutElement = cutlass::bfloat16_t;     // or the other type of 16 bits
  static constexpr int kHeadDim = kHeadDim_;  // at least head_dim and head_dim_v
  static constexpr int kColumns = kColumns_;  // keys of a tile
  // Rows of query, key and value tiles are whole swizzled rows; what lies past the head is zero.
  static constexpr int kLoadedHeadDim = kHeadDim < 128 ? 128 : kHeadDim;
  static constexpr int kStages = kHeadDim <= 128 ? 3 : 2;
  static constexpr int kValueStages = 2;
  static constexpr int kPlans = 3;
  static constexpr int kWarpgroups = 2;           // that compute
  static constexpr int kRows = 64 * kWarpgroups;  // queries of a tile
  static constexpr int kConsumers = kWarpgroup * kWarpgroups;
  static constexpr int kTurners = kWarpgroup;  // threads that turn value tiles
  static constexpr int kThreads = kWarpgroup + kConsumers + kTurners;
  // What the 65536 registers of a multiprocessor give each thread.
  static constexpr int kConsumerRegisters = kHeadDim <= 128 ? 208 : 224, kServiceRegisters = kHeadDim <= 128 ? 56 : 32;
  static constexpr int kTurnerRegisters = kHeadDim <= 128 ? 40 : 32;
  static constexpr bool kPingPong = kPingPong_;
  // From registers, queries would take ports that the softmax wants: of heads of 128, 4% more time (H200).
  static constexpr bool kQueryInRegisters = kHeadDim <= 64;
  static constexpr bool kSeparateOutput = true;
  static constexpr int kValueReaders = kTurners;
  static constexpr bool kHasKeyBias = false, kIsPlain = false;
  static constexpr int kPlanReaders = kConsumers + kLoadingThreads + kWarp + kTurners;

  // Logits are one product, weighted values one for each part of as many columns. With heads of 128, parts of 64 take a
  // fifth more time (H200).
  static constexpr int kValuePart = kHeadDim == 128 ? 128 : 64;
  static constexpr int kValueParts = kHeadDim / kValuePart;
  static constexpr int kQuerySteps = kHeadDim / 32, kWeightSteps = kColumns / 32;

  using LayoutQ =
      decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<Element>{}, Shape<Int<kRows>, Int<kLoadedHeadDim>>{}));
  using LayoutK = decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<Element>{},
                                         Shape<Int<kColumns>, Int<kLoadedHeadDim>, Int<kStages>>{}));
  // Value tiles are loaded as [token][head_dim] and turned: the matrix units read 8-bit operands along what they sum
  // over.
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
