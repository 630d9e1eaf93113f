// Key biases in the forward kernel. The warp that loads values copies the biases to shared memory, from which the
// consumer warpgroups read them.
#pragma once

#include "cuda/common/tile_walk.cuh"
#include "cuda/sm90/forward_traits.cuh"
#include "cuda/sm90/key_bias.cuh"
#include "cuda/sm90/wgmma.cuh"
#include "cuda/warp/cp_async.cuh"

namespace natten_jax::sm90 {

/// Adds the biases of a key tile to a thread's elements of the products of queries and keys.
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

/// Loads the biases of key tiles to shared memory. Runs in one warp. Each lane loads every 32nd bias of a tile.
///
/// The warp also loads values, and has few registers. So the positions of keys in a tile are computed only once per CTA
/// and kept in shared memory (`prepare_biases`). Computing them for every tile takes divisions, with which forward
/// passes took 1.5 to 1.9 times as long (H100). Copies are asynchronous, because asynchronous copies need no registers.
/// The warp that loads keys does not load biases, because it also computes the mask modes of tiles.
///
/// The warp copies a tile's biases before it waits for an empty value buffer, so that consumers do not wait longer for
/// the biases than for the tile's keys. The buffers of biases need no barriers that mark them as empty. When the warp
/// starts to copy a tile's biases, it has already waited until consumers released the values of the tile `kBiasStages`
/// tiles earlier. Consumers release the values of a tile only after they have added its biases.
template <class Traits>
class TileBiases {
 public:
  /// Computes the address and the conversion factor of the biases for a new query tile.
  CUTE_DEVICE void start(const ForwardParams& p, const TilePlan& plan) {
    head_biases = reinterpret_cast<const char*>(biases_of_head(p, plan.head));
    first_of_group = token_of_slot(p, plan.kv_slot);
    in_products = products_per_base2_logit(plan.exponent_scale);
  }

  /// Starts to copy the biases of the key tile at `walk`. `ahead` is 0 if `finish` completes this tile next, and 1 if
  /// `finish` completes one other tile first. Rows of the tile that no query attends to may get the bias of another
  /// key, because their logits are masked out.
  CUTE_DEVICE void fetch(const ForwardParams& p, typename Traits::SharedStorage& shared, const KvWalk& walk,
                         int ahead) {
    const bool has_seams = !Traits::kIsPlain && p.kv_boxes.has_seams;
    const int first = first_of_group + (has_seams ? 0 : tokens_to_key(p.axis, walk.x, walk.y, walk.z));
    const std::uint32_t destination = shared_address(shared.key_bias[(tile + ahead) % Traits::kBiasStages]);
    CUTE_UNROLL
    for (int i = 0; i < kBiasesPerLane; ++i) {
      const int position = shared.bias_positions[row(i)];
      const int from_first = has_seams ? wrapped_tokens(p, walk, position) : position;
      const unsigned token = min(static_cast<unsigned>(first + from_first), static_cast<unsigned>(p.last_key));
      // This product is a single instruction, because the byte stride between tokens fits in 32 bits.
      const std::uint64_t bytes = static_cast<std::uint64_t>(token) * (4u * static_cast<unsigned>(p.key_bias_heads));
      copy_word_async(destination + 4 * bias_index(i), head_biases + bytes, true);
    }
    commit_copies();
  }

  /// Zeroes the biases of a tile of additional keys, because additional keys have no biases.
  CUTE_DEVICE void clear(typename Traits::SharedStorage& shared) {
    CUTE_UNROLL
    for (int i = 0; i < kBiasesPerLane; ++i) shared.key_bias[tile % Traits::kBiasStages][bias_index(i)] = 0.f;
  }

  /// Waits until the next tile's biases are copied, converts them to terms of the products of queries and keys, and
  /// passes them to the consumers. Unless `is_last`, the copies of the following tile's biases may still be running.
  CUTE_DEVICE void finish(typename Traits::SharedStorage& shared, bool is_last) {
    if (is_last) {
      wait_copies<0>();
    } else {
      wait_copies<1>();
    }
    const int stage = tile++ % Traits::kBiasStages;
    CUTE_UNROLL
    for (int i = 0; i < kBiasesPerLane; ++i) {
      float& bias = shared.key_bias[stage][bias_index(i)];  // this lane has copied this bias
      bias = bias_in_products(bias, in_products);
    }
    arrive(shared.full_biases[stage]);  // every lane arrives, because every lane wrote some biases
  }

 private:
  static constexpr int kBiasesPerLane = Traits::kColumns / kWarp;

  CUTE_DEVICE static int row(int i) { return threadIdx.x % kWarp + kWarp * i; }

  /// Index in a buffer of the `i`th bias that the lane loads. The biases that a consumer lane reads are contiguous in
  /// the buffer. These are the biases of two neighboring columns in every eight columns of the logits.
  CUTE_DEVICE static int bias_index(int i) {
    const int row = threadIdx.x % kWarp;
    return row % 8 / 2 * Traits::kLaneBiases + row / 8 * 2 + row % 2 + kWarp / 4 * i;
  }

  /// Distance in tokens from the dilation group's first key to a key of the tile at `walk`. Used if a dimension wraps.
  /// `position` contains the key's coordinates in the tile, a byte per dimension.
  CUTE_DEVICE static int wrapped_tokens(const ForwardParams& p, const KvWalk& walk, int position) {
    return tokens_to_key(p.axis, p.axis[0].wrap_index(walk.x + (position & 0xff)),
                         p.axis[1].wrap_index(walk.y + (position >> 8 & 0xff)),
                         p.axis[2].wrap_index(walk.z + (position >> 16)));
  }

  const char* head_biases;
  int first_of_group;
  float in_products;
  unsigned tile = 0;  // number of the tile that `finish` completes next
};

/// Stores the position of each key of a tile in shared memory. A position is the key's distance in tokens from the
/// tile's first key. If a dimension wraps, it is instead the key's coordinates in the tile, a byte per dimension.
template <class Traits>
CUTE_DEVICE void prepare_biases(const ForwardParams& p, typename Traits::SharedStorage& shared) {
  for (int row = threadIdx.x; row < Traits::kColumns; row += Traits::kThreads) {
    if (!Traits::kIsPlain && p.kv_boxes.has_seams) {
      const int3 at = position_in_boxes(p.kv_boxes, row);
      shared.bias_positions[row] = at.x | at.y << 8 | at.z << 16;
    } else {
      const int3 at = position_in_tile<&DeviceAxis::by_kv_tile>(p.axis, row);
      shared.bias_positions[row] = tokens_to_key(p.axis, at.x, at.y, at.z);
    }
  }
}

/// Placeholder for TileBiases in kernels without key biases.
struct NoBiases {};

}  // namespace natten_jax::sm90
