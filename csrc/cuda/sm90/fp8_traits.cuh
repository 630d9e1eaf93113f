// Forms (compiled variants) of the forward kernel for 8-bit floats. A form defines tile sizes, products, barriers, and
// the contents of shared memory.
#pragma once

#include "cuda/sm90/forward_traits.cuh"

namespace natten_jax::sm90 {

/// Base-2 exponents of e4m3 weights. The weight of a row's reference (Float8Softmax) is 2^kWeightExponent instead of 1,
/// so that fewer weights are denormal. Weights must not exceed 2^kLargestExponent, because e4m3 saturates at 448. A
/// logit in base 2 may exceed the reference by the difference of the two exponents.
constexpr float kWeightExponent = 7.f, kLargestExponent = 8.75f;

template <int kHeadDim_, int kColumns_, bool kPingPong_>
struct Float8Traits {
  using Element = cutlass::float_e4m3_t;
  using OutElement = cutlass::bfloat16_t;     // The output can also be float16, which has the same size.
  static constexpr int kHeadDim = kHeadDim_;  // Upper bound of head_dim and head_dim_v.
  static constexpr int kColumns = kColumns_;  // Maximum number of keys of a key/value tile.
  // Each row of a query, key or value tile consists of whole swizzled rows of 128 bytes. Elements past the end of the
  // head are zero.
  static constexpr int kLoadedHeadDim = kHeadDim < 128 ? 128 : kHeadDim;
  static constexpr int kStages = kHeadDim <= 128 ? 3 : 2;
  static constexpr int kValueStages = 2;
  static constexpr int kPlans = 3;
  static constexpr int kWarpgroups = 2;           // Number of consumer warpgroups.
  static constexpr int kRows = 64 * kWarpgroups;  // Maximum number of queries of a query tile.
  static constexpr int kConsumers = kWarpgroup * kWarpgroups;
  static constexpr int kTransposingThreads = kWarpgroup;  // number of threads that transpose value tiles
  static constexpr int kThreads = kWarpgroup + kConsumers + kTransposingThreads;
  // Registers per thread. A CTA uses the 65536 registers of an SM.
  static constexpr int kConsumerRegisters = kHeadDim <= 128 ? 208 : 224, kServiceRegisters = kHeadDim <= 128 ? 56 : 32;
  static constexpr int kTransposingRegisters = kHeadDim <= 128 ? 40 : 32;
  static constexpr bool kPingPong = kPingPong_;
  // With heads of 128, passes would take 4% longer if Q were in registers (H200), because Q would compete with the
  // softmax for register ports.
  static constexpr bool kQueryInRegisters = kHeadDim <= 64;
  static constexpr bool kSeparateOutput = true;
  static constexpr int kValueReaders = kTransposingThreads;
  static constexpr bool kHasKeyBias = false, kIsPlain = false;
  static constexpr int kPlanReaders = kConsumers + kLoadingThreads + kWarp + kTransposingThreads;

  // The weighted values are computed in parts of `kValuePart` columns, with a product for each part. With heads of 128,
  // two parts of 64 columns took a fifth more time than one part (H200).
  static constexpr int kValuePart = kHeadDim == 128 ? 128 : 64;
  static constexpr int kValueParts = kHeadDim / kValuePart;
  static constexpr int kQuerySteps = kHeadDim / 32, kWeightSteps = kColumns / 32;

  using LayoutQ =
      decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<Element>{}, Shape<Int<kRows>, Int<kLoadedHeadDim>>{}));
  using LayoutK = decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<Element>{},
                                         Shape<Int<kColumns>, Int<kLoadedHeadDim>, Int<kStages>>{}));
  // Layout of transposed value tiles. Value tiles are loaded as [token][head_dim], but 8-bit wgmma operands must be
  // contiguous along the dimension over which the product sums. So a warpgroup transposes them in shared memory.
  using TransposedAtom =
      std::conditional_t<kColumns == 128, GMMA::Layout_K_SW128_Atom<Element>, GMMA::Layout_K_SW64_Atom<Element>>;
  using LayoutTransposed =
      decltype(tile_to_shape(TransposedAtom{}, Shape<Int<kHeadDim>, Int<kColumns>, Int<kValueStages>>{}));
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
      ClusterBarrier::init(&shared.full_transposed[i], kTransposingThreads);
      ClusterBarrier::init(&shared.empty_transposed[i], kConsumers);
    }
  }

  struct SharedStorage {
    alignas(1024) Element q[cosize_v<LayoutQ>];
    alignas(1024) Element k[cosize_v<LayoutK>];
    alignas(1024) Element v[kColumns * kLoadedHeadDim * kStages];
    alignas(1024) Element transposed[cosize_v<LayoutTransposed>];
    alignas(1024) OutElement o[kRows * kHeadDim];
    float2 earlier[1];
    TilePlan plan[kPlans];
    int4 tile[kStages];  // see ForwardTraits::SharedStorage
    std::uint32_t mask_words[KeyColumnMask::capacity(kColumns)];
    alignas(8) std::uint64_t first_key_loaded, full_q, empty_q, empty_o;
    std::uint64_t full_plan[kPlans], full_windows[kPlans], empty_plan[kPlans];
    std::uint64_t full_k[kStages], empty_k[kStages], full_v[kStages], empty_v[kStages];
    std::uint64_t full_transposed[kValueStages], empty_transposed[kValueStages];
  };
};

}  // namespace natten_jax::sm90
