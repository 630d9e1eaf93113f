// The biases of key tiles in the forward kernel: the warp that loads values brings them into shared memory, where those
// that compute find them.
#pragma once

#include "cuda/common/tile_walk.cuh"
#include "cuda/sm90/forward_traits.cuh"
#include "cuda/sm90/key_bias.cuh"
#include "cuda/sm90/wgmma.cuh"
#include "cuda/warp/cp_async.cuh"

namespace natten_jax::sm90 {

/// Where the biases of the tile in a key buffer are: a ring as long as two rounds of the ring of keys, so that a key
/// buffer falls free before its biases were read, and a tile's are on their way while the one before it is in use.
template <class Traits>
CUTE_DEVICE float* biases_in(typename Traits::SharedStorage& shared, Ring<Traits::kStages> keys) {
  return shared.key_bias[keys.index + Traits::kStages * keys.phase];
}

/// Adds a tile's to the products of a thread's rows.
template <class Traits, class Logits>
CUTE_DEVICE void add_biases(AccumulatorRows<Logits> s, const float* biases) {
  biases += threadIdx.x % 4 * Traits::kLaneBiases;
  CUTE_UNROLL
  for (int n = 0; n < s.kColumns; n += 4) {
    const float4 four = *reinterpret_cast<const float4*>(biases + n);
    CUTE_UNROLL
    for (int row = 0; row < 2; ++row) {
      s(row, n) += four.x;
      s(row, n + 1) += four.y;
      s(row, n + 2) += four.z;
      s(row, n + 3) += four.w;
    }
  }
}

/// Loads the biases of key tiles, of which each lane of a warp has every 32nd.
///
/// One warp does this for all of a multiprocessor, beside its other work and with few registers: what is the same for
/// all tiles lies in shared memory, and nothing of a tile that is on its way is in a register. Divisions for each tile
/// made forward passes 1.5 to 1.9 times as long (H100). It is not the warp that loads keys, which also finds out how
/// tiles are masked.
template <class Traits>
class TileBiases {
 public:
  /// A query tile begins.
  CUTE_DEVICE void start(const ForwardParams& p, const TilePlan& plan) {
    of_head = reinterpret_cast<const char*>(biases_of_head(p, plan.head));
    first_of_group = token_of_slot(p, plan.kv_slot);
    in_products = products_per_logit(plan.exponent_scale);
  }

  /// Starts to copy those of the next tile, which is at `walk`. Rows that hold no key which a query sees are masked
  /// whatever is added to them: they get the bias of some key.
  CUTE_DEVICE void fetch(const ForwardParams& p, typename Traits::SharedStorage& shared, const KvWalk& walk) {
    const bool goes_around = !Traits::kIsPlain && p.kv_boxes.go_around;
    const int first = first_of_group + (goes_around ? 0 : tokens_to_key(p.axis, walk.x, walk.y, walk.z));
    const auto destination = static_cast<std::uint32_t>(__cvta_generic_to_shared(biases_in<Traits>(shared, key)));
    CUTE_UNROLL
    for (int i = 0; i < kOfLane; ++i) {
      const int place = shared.bias_places[row(i)];
      const int from_first = goes_around ? tokens_around(p, walk, place) : place;
      const unsigned token = min(static_cast<unsigned>(first + from_first), static_cast<unsigned>(p.last_key));
      // One instruction: bytes from one token to the next are as many as 32 bits hold.
      const std::uint64_t bytes = static_cast<std::uint64_t>(token) * (4u * static_cast<unsigned>(p.key_bias_heads));
      copy_word_async(destination + 4 * place_of_bias(i), of_head + bytes, true);
    }
    commit_copies();
  }

  /// Additional keys have none.
  CUTE_DEVICE void clear(typename Traits::SharedStorage& shared) {
    CUTE_UNROLL
    for (int i = 0; i < kOfLane; ++i) biases_in<Traits>(shared, key)[place_of_bias(i)] = 0.f;
  }

  /// Makes them numbers that are added to products, as soon as the tile's buffer of keys is free.
  CUTE_DEVICE void store(typename Traits::SharedStorage& shared) {
    wait_copies<0>();
    CUTE_UNROLL
    for (int i = 0; i < kOfLane; ++i) {
      float& bias = biases_in<Traits>(shared, key)[place_of_bias(i)];  // which this lane has copied
      bias = bias_in_products(bias, in_products);
    }
    key.wait_empty(shared.empty_k);
    arrive(shared.full_k[key.index]);  // every lane wrote a part
    key.advance();
  }

 private:
  static constexpr int kOfLane = Traits::kColumns / kWarp;

  CUTE_DEVICE static int row(int i) { return threadIdx.x % kWarp + kWarp * i; }

  /// Where the bias of that row is: of eight neighbors, each lane that computes has two.
  CUTE_DEVICE static int place_of_bias(int i) {
    const int row = threadIdx.x % kWarp;
    return row % 8 / 2 * Traits::kLaneBiases + row / 8 * 2 + row % 2 + kWarp / 4 * i;
  }

  /// Tokens from the group's first key to one of the tile at `walk`, whose dimensions may wrap.
  CUTE_DEVICE static int tokens_around(const ForwardParams& p, const KvWalk& walk, int place) {
    return tokens_to_key(p.axis, p.axis[0].around(walk.x + (place & 0xff)),
                         p.axis[1].around(walk.y + (place >> 8 & 0xff)), p.axis[2].around(walk.z + (place >> 16)));
  }

  const char* of_head;
  int first_of_group;
  float in_products;
  Ring<Traits::kStages> key;
};

/// Works out where the keys of a tile lie: tokens from the tile's first one; or a byte for each coordinate, where tiles
/// go around.
template <class Traits>
CUTE_DEVICE void prepare_biases(const ForwardParams& p, typename Traits::SharedStorage& shared) {
  for (int row = threadIdx.x; row < Traits::kColumns; row += Traits::kThreads) {
    if (!Traits::kIsPlain && p.kv_boxes.go_around) {
      const int3 at = place_in_boxes(p.kv_boxes, row);
      shared.bias_places[row] = at.x | at.y << 8 | at.z << 16;
    } else {
      const int3 at = place_in_tile<&DeviceAxis::by_kv_tile>(p.axis, row);
      shared.bias_places[row] = tokens_to_key(p.axis, at.x, at.y, at.z);
    }
  }
}

/// In place of them, of kernels without.
struct NoBiases {};

}  // namespace natten_jax::sm90
