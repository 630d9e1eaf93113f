// The biases of key tiles in the forward kernel, as the warp that loads values brings them into shared memory.
#pragma once

#include "cuda/common/tile_walk.cuh"
#include "cuda/sm90/forward_traits.cuh"
#include "cuda/sm90/key_bias.cuh"

namespace natten_jax::sm90 {

/// The biases of a key tile, of which each lane of a warp has every 32nd.
///
/// One warp does this for all of a multiprocessor, and a step that depends on the one before takes it a handful of
/// cycles: what is the same for all tiles, or for those of a query tile, is worked out once. Divisions for each tile
/// made forward passes 1.5 to 1.9 times as long (H100). It is not the warp that loads keys, which also finds out how
/// tiles are masked.
template <class Traits>
class TileBiases {
 public:
  CUTE_DEVICE explicit TileBiases(const ForwardParams& p) {
    CUTE_UNROLL
    for (int i = 0; i < kOfLane; ++i) {
      if (p.kv_boxes.go_around) {
        const int3 at = place_in_boxes(p.kv_boxes, row(i));
        place[i] = at.x | at.y << 8 | at.z << 16;
      } else {
        const int3 at = place_in_tile<&DeviceAxis::by_kv_tile>(p.axis, row(i));
        place[i] = tokens_to_key(p.axis, at.x, at.y, at.z);
      }
    }
  }

  /// A query tile begins.
  CUTE_DEVICE void start(const ForwardParams& p, const TilePlan& plan) {
    of_head = reinterpret_cast<const char*>(biases_of_head(p, plan.head));
    first_of_group = token_of_slot(p, plan.kv_slot);
    in_products = products_per_logit(plan.exponent_scale);
  }

  /// Starts to load those of the tile at `walk`. Rows that hold no key which a query
  /// sees are masked whatever is added to them: they get the bias of some key.
  CUTE_DEVICE void fetch(const ForwardParams& p, const KvWalk& walk) {
    const int first = first_of_group + (p.kv_boxes.go_around ? 0 : tokens_to_key(p.axis, walk.x, walk.y, walk.z));
    CUTE_UNROLL
    for (int i = 0; i < kOfLane; ++i) {
      const int from_first = p.kv_boxes.go_around ? tokens_around(p, walk, place[i]) : place[i];
      const unsigned token = min(static_cast<unsigned>(first + from_first), static_cast<unsigned>(p.last_key));
      // One instruction: bytes from one token to the next are as many as 32 bits hold.
      const std::uint64_t bytes = static_cast<std::uint64_t>(token) * (4u * static_cast<unsigned>(p.key_bias_heads));
      of_lane[i] = *reinterpret_cast<const float*>(of_head + bytes);
    }
  }

  /// Additional keys have none.
  CUTE_DEVICE void clear() {
    CUTE_UNROLL
    for (int i = 0; i < kOfLane; ++i) of_lane[i] = 0.f;
  }

  /// Stores them as an operand of a product, as soon as the next tile's buffer is free.
  CUTE_DEVICE void store(typename Traits::SharedStorage& shared) {
    key.wait_empty(shared.empty_k);
    Tensor of_keys = make_tensor(make_smem_ptr(shared.key_bias), typename Traits::LayoutBias{});
    CUTE_UNROLL
    for (int i = 0; i < kOfLane; ++i) {
      const uint2 parts = parts_of_bias(bias_in_products(of_lane[i], in_products));
      *reinterpret_cast<uint2*>(&of_keys(row(i), 0, key.index)) = parts;
    }
    cutlass::arch::fence_view_async_shared();  // the matrix units read them
    arrive(shared.full_k[key.index]);          // every lane wrote a part
    key.advance();
  }

 private:
  static constexpr int kOfLane = Traits::kColumns / kWarp;

  CUTE_DEVICE static int row(int i) { return threadIdx.x % kWarp + kWarp * i; }

  /// Tokens from the group's first key to one of the tile at `walk`, whose dimensions may wrap.
  CUTE_DEVICE static int tokens_around(const ForwardParams& p, const KvWalk& walk, int place) {
    return tokens_to_key(p.axis, p.axis[0].around(walk.x + (place & 0xff)),
                         p.axis[1].around(walk.y + (place >> 8 & 0xff)), p.axis[2].around(walk.z + (place >> 16)));
  }

  // Of the lane's keys: tokens from the tile's first one; or a byte for each coordinate, where tiles go around.
  int place[kOfLane];
  const char* of_head;
  int first_of_group;
  float in_products;
  float of_lane[kOfLane];
  Ring<Traits::kStages> key;
};

/// Makes the operands of the products with biases ready: what is multiplied with these, and zeros behind their parts.
template <class Traits>
CUTE_DEVICE void prepare_biases(typename Traits::SharedStorage& shared) {
  Tensor biases = make_tensor(make_smem_ptr(shared.key_bias), typename Traits::LayoutBias{});
  for (int i = threadIdx.x; i < size(biases); i += Traits::kThreads) biases(i) = BiasPart(0.f);
  Tensor ones = make_tensor(make_smem_ptr(shared.ones), typename Traits::LayoutOnes{});
  for (int i = threadIdx.x; i < size(ones); i += Traits::kThreads) {
    ones(i) = BiasPart(i / size<0>(ones) < kBiasParts ? 1.f : 0.f);
  }
  cutlass::arch::fence_view_async_shared();
}

/// In place of them, of kernels without.
struct NoBiases {
  CUTE_DEVICE explicit NoBiases(const ForwardParams&) {}
};

}  // namespace natten_jax::sm90
