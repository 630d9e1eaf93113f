// Biases of keys, which products of queries and keys begin with. Where keys are columns, a warp keeps those of its
// tile's pairs of groups in shared memory, in the order in which its lanes read them, and fills them in anew for the
// next item as soon as it has read them. Where keys are rows, their biases are two numbers of each lane.
#pragma once

#include <cfloat>

#include "cuda/small/copies.cuh"

namespace natten_jax::small {

/// What an item's biases are divided by, as they are added to products that are yet to be scaled: its inverse. What is
/// too large for a number would hide nothing, and be none beside what hides.
CUTE_DEVICE float key_bias_of_products(float bias, float inverse_scale) {
  return fminf(bias * inverse_scale, FLT_MAX);
}

/// Those of a warp's columns, where `kAreThere`.
template <bool kAreThere>
class ColumnKeyBias {
 public:
  CUTE_DEVICE ColumnKeyBias(const CommonParams& p, const Tables& tables, const TilePlan& tile, const Item& first)
      : p_(p), tables_(tables), tile_(tile) {
    if constexpr (kAreThere) {
      // What no window sees has none: additional tokens, and what fills up the last pair.
      const int lane = threadIdx.x % 32;
      for (int i = tile.pairs * 2 * kColumns + lane; i < p.region.table * 2 * kColumns; i += 32) {
        store_word(slots() + 4 * i, 0);
      }
      load(first);
    }
  }

  /// To be called when an item's have come.
  CUTE_DEVICE void prepare(const Item& item) const {
    if constexpr (kAreThere) {
      if (!is_new_) return;
      const float inverse_scale = 1.f / item.scale(p_).logits;
      for (int i = threadIdx.x % 32; i < tile_.pairs * 2 * kColumns; i += 32) {
        const std::uint32_t at = slots() + 4 * i;
        store_word(at, __float_as_uint(key_bias_of_products(__uint_as_float(load_word(at)), inverse_scale)));
      }
      __syncwarp();
    }
  }

  /// To be called when all lanes have read the item's: starts to copy those of the next one, unless they are the same.
  CUTE_DEVICE void load_behind(const Item& item) {
    if constexpr (kAreThere) {
      Item next = item;
      next.next(p_);
      is_new_ = !p_.key_bias.is_of_all_heads || p_.scale.heads != nullptr || next.batch != item.batch;
      if (!is_new_ || next.number(p_) >= p_.items) return;
      __syncwarp();
      load(next);
    }
  }

 private:
  CUTE_DEVICE std::uint32_t slots() const { return tables_.key_bias - threadIdx.x % 4 * 8; }

  CUTE_DEVICE void load(const Item& item) const {
    const bool is_of_all = p_.key_bias.is_of_all_heads;
    const int lane = threadIdx.x % 32, pitch = is_of_all ? 4 : 4 * p_.heads;
    const char* const from = advance(reinterpret_cast<const char*>(p_.key_bias.of_keys), item.of_batch, pitch) +
                             (is_of_all ? 0 : 4 * item.head);
    const int column = lane % (2 * kColumns);
    for (int pair = lane / (2 * kColumns); pair < tile_.pairs; pair += 2) {
      // What a group has outside of the layout is hidden: any number does.
      const int key = tile_.key + static_cast<int>(tables_.entries[pair]);
      const char* const source = advance(from, min(max(key, 0), p_.keys - 1), pitch);
      copy_word_async(slots() + pair * kKeyBiasBytes + 4 * column, source, true);
    }
    commit_copies();
  }

  const CommonParams& p_;
  const Tables& tables_;
  const TilePlan& tile_;
  bool is_new_ = true;
};

/// Those of a lane's two rows, and their gradients.
class RowKeyBias {
 public:
  CUTE_DEVICE RowKeyBias(const CommonParams& p, const Item& item, const int2* row_places) : p_(p) {
    const int2 places = row_places[threadIdx.x % 32 / 4];
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int place = r == 0 ? places.x : places.y;
      // Places are those of heads of keys.
      key_[r] = place < 0 ? -1 : item.of_batch + p.key_bias.by_heads_kv.divide(place);
    }
    head_ = item.head;
  }

  /// As accumulators have their rows: each twice.
  CUTE_DEVICE void load(float (&biases)[4], float scale) const {
    const float inverse_scale = 1.f / scale;
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      float bias = 0.f;
      if (key_[r] >= 0) {
        const float* const from = p_.key_bias.of_keys;
        bias = p_.key_bias.is_of_all_heads ? from[key_[r]] : from[of_head(r)];
      }
      biases[2 * r] = biases[2 * r + 1] = key_bias_of_products(bias, inverse_scale);
    }
  }

  /// Writes sums of gradients of logits, each of which the lanes of a row have.
  CUTE_DEVICE void store(const float (&sums)[4]) const {
    if (threadIdx.x % 4 > 0) return;
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      if (key_[r] >= 0) p_.key_bias.gradient[of_head(r)] = sums[2 * r];
    }
  }

 private:
  CUTE_DEVICE std::int64_t of_head(int r) const { return std::int64_t{key_[r]} * p_.heads + head_; }

  const CommonParams& p_;
  int key_[2], head_;
};

}  // namespace natten_jax::small
