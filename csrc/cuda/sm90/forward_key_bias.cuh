// Key biases in the forward kernel: the warp that loads values copies them to shared memory for the consumer
// warpgroups.
#pragma once

#include "cuda/common/tile_walk.cuh"
#include "cuda/sm90/forward_traits.cuh"
#include "cuda/sm90/key_bias.cuh"
#include "cuda/sm90/wgmma.cuh"
#include "cuda/warp/cp_async.cuh"

namespace natten_jax::sm90 {

/// Adds a tile's biases to the products of a thread's rows.
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

/// Loads the biases of key tiles; each lane of a warp loads every 32nd.
///
/// A single warp of the SM does this in addition to loading values, with few registers. So values common to all tiles
/// are kept in shared memory, and copies are asynchronous and use no registers. Divisions for each tile made forward
/// passes 1.5 to 1.9 times as long (H100). The warp that loads keys does not load biases, because it also computes the
/// mask modes of tiles.
///
/// The copies run ahead of the keys, so that consumers do not wait longer for biases than for keys. The copies need no
/// empty barrier: when the warp copies a tile's biases, it has waited for the value buffer of the tile `kBiasStages`
/// tiles earlier. Consumers release that buffer after they have added the biases of its tile.
template <class Traits>
class TileBiases {
 public:
  /// Prepares for a new query tile.
  CUTE_DEVICE void start(const ForwardParams& p, const TilePlan& plan) {
    of_head = reinterpret_cast<const char*>(biases_of_head(p, plan.head));
    first_of_group = token_of_slot(p, plan.kv_slot);
    in_products = products_per_base2_logit(plan.exponent_scale);
  }

  /// Starts to copy the biases of the tile at `walk`, which is the next tile or `ahead` tiles after it. Rows without a
  /// visible key get the bias of an arbitrary key, because the mask hides them anyway.
  CUTE_DEVICE void fetch(const ForwardParams& p, typename Traits::SharedStorage& shared, const KvWalk& walk,
                         int ahead) {
    const bool goes_around = !Traits::kIsPlain && p.kv_boxes.go_around;
    const int first = first_of_group + (goes_around ? 0 : tokens_to_key(p.axis, walk.x, walk.y, walk.z));
    const std::uint32_t destination = shared_address(shared.key_bias[(tile + ahead) % Traits::kBiasStages]);
    CUTE_UNROLL
    for (int i = 0; i < kOfLane; ++i) {
      const int place = shared.bias_places[row(i)];
      const int from_first = goes_around ? tokens_around(p, walk, place) : place;
      const unsigned token = min(static_cast<unsigned>(first + from_first), static_cast<unsigned>(p.last_key));
      // A single instruction: the byte stride between tokens fits in 32 bits.
      const std::uint64_t bytes = static_cast<std::uint64_t>(token) * (4u * static_cast<unsigned>(p.key_bias_heads));
      copy_word_async(destination + 4 * place_of_bias(i), of_head + bytes, true);
    }
    commit_copies();
  }

  /// Zeroes the biases of a tile of additional keys, which have none.
  CUTE_DEVICE void clear(typename Traits::SharedStorage& shared) {
    CUTE_UNROLL
    for (int i = 0; i < kOfLane; ++i) shared.key_bias[tile % Traits::kBiasStages][place_of_bias(i)] = 0.f;
  }

  /// Converts the next tile's biases to terms of the products. Copies of the tile after it may still be running.
  CUTE_DEVICE void finish(typename Traits::SharedStorage& shared, bool is_last) {
    if (is_last) {
      wait_copies<0>();
    } else {
      wait_copies<1>();
    }
    const int stage = tile++ % Traits::kBiasStages;
    CUTE_UNROLL
    for (int i = 0; i < kOfLane; ++i) {
      float& bias = shared.key_bias[stage][place_of_bias(i)];  // copied by this lane
      bias = bias_in_products(bias, in_products);
    }
    arrive(shared.full_biases[stage]);  // every lane wrote a part
  }

 private:
  static constexpr int kOfLane = Traits::kColumns / kWarp;

  CUTE_DEVICE static int row(int i) { return threadIdx.x % kWarp + kWarp * i; }

  /// Offset of a row's bias in shared memory, where the biases that a consumer lane reads are contiguous: each of four
  /// lanes reads two of eight neighboring columns.
  CUTE_DEVICE static int place_of_bias(int i) {
    const int row = threadIdx.x % kWarp;
    return row % 8 / 2 * Traits::kLaneBiases + row / 8 * 2 + row % 2 + kWarp / 4 * i;
  }

  /// Distance in tokens from the group's first key to a key of the tile at `walk`, if dimensions may wrap.
  CUTE_DEVICE static int tokens_around(const ForwardParams& p, const KvWalk& walk, int place) {
    return tokens_to_key(p.axis, p.axis[0].around(walk.x + (place & 0xff)),
                         p.axis[1].around(walk.y + (place >> 8 & 0xff)), p.axis[2].around(walk.z + (place >> 16)));
  }

  const char* of_head;
  int first_of_group;
  float in_products;
  unsigned tile = 0;  // number of the next tile
};

/// Computes positions of the keys of a tile: tokens from the tile's first key or, if tiles wrap around, a byte per
/// coordinate.
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

/// Placeholder for TileBiases in kernels without key biases.
struct NoBiases {};

}  // namespace natten_jax::sm90
