// The biases of key tiles in the forward kernel: the warp that loads values brings them into shared memory, where those
// that compute find them.
#pragma once

#include "cuda/common/tile_walk.cuh"
#include "cuda/sm90/forward_traits.cuh"
#include "cuda/sm90/key_bias.cuh"
#include "cuda/sm90/wgmma.cuh"
#include "cuda/warp/cp_async.cuh"

namespace natten_jax::sm90 {

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
///
/// It runs ahead of the keys, so that nobody waits for biases where keys would do, and asks for no buffer: when it
/// copies a tile's biases, it has waited for the buffer that the values of the tile `kBiasStages` before it had, and
/// whoever has left that has added that tile's biases.
template <class Traits>
class TileBiases {
 public:
  /// A query tile begins.
  CUTE_DEVICE void start(const ForwardParams& p, const TilePlan& plan) {
    of_head = reinterpret_cast<const char*>(biases_of_head(p, plan.head));
    first_of_group = token_of_slot(p, plan.kv_slot);
    in_products = products_per_base2_logit(plan.exponent_scale);
  }

  /// Starts to copy those of the tile at `walk`: the next one, or `ahead` tiles behind it. Rows that hold no key which
  /// a query sees are masked whatever is added to them: they get the bias of some key.
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
      // One instruction: bytes from one token to the next are as many as 32 bits hold.
      const std::uint64_t bytes = static_cast<std::uint64_t>(token) * (4u * static_cast<unsigned>(p.key_bias_heads));
      copy_word_async(destination + 4 * place_of_bias(i), of_head + bytes, true);
    }
    commit_copies();
  }

  /// Additional keys have none.
  CUTE_DEVICE void clear(typename Traits::SharedStorage& shared) {
    CUTE_UNROLL
    for (int i = 0; i < kOfLane; ++i) shared.key_bias[tile % Traits::kBiasStages][place_of_bias(i)] = 0.f;
  }

  /// Makes those of the next tile numbers that are added to products. Copies for the one behind it may be under way.
  CUTE_DEVICE void finish(typename Traits::SharedStorage& shared, bool is_last) {
    if (is_last) {
      wait_copies<0>();
    } else {
      wait_copies<1>();
    }
    const int stage = tile++ % Traits::kBiasStages;
    CUTE_UNROLL
    for (int i = 0; i < kOfLane; ++i) {
      float& bias = shared.key_bias[stage][place_of_bias(i)];  // which this lane has copied
      bias = bias_in_products(bias, in_products);
    }
    arrive(shared.full_biases[stage]);  // every lane wrote a part
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
  unsigned tile = 0;  // the next one
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
