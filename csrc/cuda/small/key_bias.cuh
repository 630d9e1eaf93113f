// Key biases, which initialize the accumulators of products of queries and keys. If keys are columns, a warp keeps the
// biases of its tile's pairs of groups in shared memory, in the order in which its lanes read them. After the last read
// of an item's biases, it starts to load the biases of the next item. If keys are rows, each lane holds the biases of
// its two rows in registers.
#pragma once

#include "cuda/common/arithmetic.cuh"
#include "cuda/common/key_bias.cuh"
#include "cuda/small/copies.cuh"

namespace natten_jax::small {

/// Biases of the keys that are a warp's columns. If `kAreThere` is false, its functions do nothing.
template <bool kAreThere>
class ColumnKeyBias {
 public:
  CUTE_DEVICE ColumnKeyBias(const CommonParams& p, const Tables& tables, const TilePlan& tile, const Item& first)
      : p_(p), tables_(tables), tile_(tile) {
    if constexpr (kAreThere) {
      // Additional tokens and the padding of the last pair have no bias.
      for (int i = tile.pairs * 2 * kColumns + lane(); i < p.region.table_capacity * 2 * kColumns; i += 32) {
        store_word(slots() + 4 * i, 0);
      }
      load(first);
    }
  }

  /// Converts an item's biases to terms that are added to products. Before the call, the loads of the biases have to be
  /// complete, and the warp has to be done with the previous item.
  CUTE_DEVICE void prepare(const Item& item) {
    if constexpr (kAreThere) {
      if (!is_new_) return;
      const float inverse_scale = fast_products_per_logit(item.scale(p_).logits);
      // Not unrolled: in small problems, instruction fetches determine the time.
      CUTE_NO_UNROLL
      for (int pair = pair_of(0); pair < tile_.pairs; pair += 2) {
        float& slot = *static_cast<float*>(__cvta_shared_to_generic(slot_of(pair)));
        const float bias = pair < kHeldPairs ? held_[0] : slot;
        slot = bias_in_products(bias, inverse_scale);
        CUTE_UNROLL
        for (int i = 1; i < kHeld; ++i) held_[i - 1] = held_[i];
      }
      __syncwarp();
    }
  }

  /// Must be called after the warp's last read of an item's biases. Starts to load the next item's biases if they or
  /// the next item's scale may differ.
  CUTE_DEVICE void release(const Item& item) {
    if constexpr (kAreThere) {
      __syncwarp();
      CUTE_UNROLL
      for (float& bias : held_) bias = 0.f;  // otherwise registers would still hold the previous item's biases
      Item next = item;
      next.next(p_);
      is_new_ = !p_.key_bias.is_shared_by_heads || p_.scale.heads != nullptr || next.batch != item.batch;
      if (is_new_ && next.number(p_) < p_.items) load(next);
    }
  }

 private:
  static constexpr int kWord = 4, kWords = 4;  // bytes of a word, and words of a chunk
  // A lane loads `kHeld` biases of the first `kHeldPairs` pairs into registers. The biases of further pairs are copied
  // directly to their slots in shared memory.
  static constexpr int kHeld = 4, kHeldPairs = 2 * kHeld;

  CUTE_DEVICE static int lane() { return threadIdx.x % 32; }
  CUTE_DEVICE static int pair_of(int held) { return lane() / (2 * kColumns) + 2 * held; }
  CUTE_DEVICE std::uint32_t slots() const { return tables_.key_bias - lane() % 4 * (kWord * kWords); }

  /// Returns the address of the lane's slot for a pair: each of 16 lanes loads the bias of one column of the pair. The
  /// slots are ordered so that one read gives a lane the biases of its two columns in each group of the pair.
  CUTE_DEVICE std::uint32_t slot_of(int pair) const {
    const int column = lane() % kColumns, group = lane() / kColumns % 2;
    return slots() + pair * kKeyBiasBytes + kWord * (column / 2 * kWords + group * 2 + column % 2);
  }

  /// Starts to load an item's biases.
  CUTE_DEVICE void load(const Item& item) {
    const bool is_shared = p_.key_bias.is_shared_by_heads;
    const int pitch = is_shared ? kWord : kWord * p_.heads;
    const char* const from = advance(reinterpret_cast<const char*>(p_.key_bias.biases), item.first_key, pitch) +
                             (is_shared ? 0 : kWord * item.head);
    const auto bias_address = [&](int pair) {
      // Keys outside of the layout are hidden (masked out), so that any valid address will do.
      const int key = tile_.key + static_cast<int>(tables_.entries[pair]);
      return reinterpret_cast<const float*>(advance(from, min(max(key, 0), p_.keys - 1), pitch));
    };
    CUTE_UNROLL
    for (int i = 0; i < kHeld; ++i) {
      const int pair = pair_of(i);
      if (pair < tile_.pairs) held_[i] = *bias_address(pair);
    }
    if (tile_.pairs <= kHeldPairs) return;
    for (int pair = pair_of(kHeld); pair < tile_.pairs; pair += 2) {
      copy_word_async(slot_of(pair), bias_address(pair), true);
    }
    commit_copies();
  }

  const CommonParams& p_;
  const Tables& tables_;
  const TilePlan& tile_;
  float held_[kHeld];
  bool is_new_ = true;
};

/// Biases of the keys that are a lane's two rows, and their gradients. If `kAreThere` is false, its functions do
/// nothing.
template <bool kAreThere>
class RowKeyBias {
 public:
  CUTE_DEVICE RowKeyBias(const CommonParams& p, const int2* row_indices) : p_(p), row_indices_(row_indices) {}

  /// Starts to load an item's biases.
  CUTE_DEVICE void load(const Item& item) {
    if constexpr (kAreThere) {
      for_rows([&](int r, int index) {
        const float* const from = p_.key_bias.biases;
        loaded_[r] = p_.key_bias.is_shared_by_heads ? from[item.first_key + p_.key_bias.by_heads_kv.divide(index)]
                                                    : from[head_index(item, index)];
      });
    }
  }

  /// Converts the loaded biases to terms that are added to products. `biases` has each of them twice, in accumulator
  /// order.
  CUTE_DEVICE void take(float (&biases)[4], float scale) const {
    if constexpr (kAreThere) {
      const float inverse_scale = fast_products_per_logit(scale);
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        const float bias = loaded_[i / 2];
        // This does not call bias_in_products: with that function, ptxas spills 40 bytes instead of 8, and NAT's first
        // stage takes 3% longer.
        biases[i] = added_product(bias, clipped_by_min_max(bias * inverse_scale));
      }
    }
  }

  /// Writes the gradients of the biases. `sums` are sums of logit gradients over queries; all four lanes that share a
  /// row have that row's sum.
  CUTE_DEVICE void store(const Item& item, const float (&sums)[4]) const {
    if constexpr (kAreThere) {
      if (threadIdx.x % 4 > 0) return;
      for_rows([&](int r, int index) { p_.key_bias.gradient[head_index(item, index)] = sums[2 * r]; });
    }
  }

 private:
  /// Calls `call(r, index)` for each of the lane's two rows that is inside the layout.
  template <class Call>
  CUTE_DEVICE void for_rows(const Call& call) const {
    const int2 indices = row_indices_[threadIdx.x % 32 / 4];
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int index = r == 0 ? indices.x : indices.y;
      if (index >= 0) call(r, index);
    }
  }

  /// Returns the index for a key and the item's query head in an array [batch, keys, heads]. `index` is the key's index
  /// in a batch entry's array [keys, heads_kv], for the first key/value head.
  CUTE_DEVICE std::int64_t head_index(const Item& item, int index) const {
    return std::int64_t{item.first_key} * p_.heads + std::int64_t{index} * p_.by_heads_per_kv.divisor + item.head;
  }

  const CommonParams& p_;
  const int2* row_indices_;
  float loaded_[2] = {};
};

}  // namespace natten_jax::small
