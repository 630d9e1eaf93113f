// Biases of keys, which products of queries and keys begin with. Where keys are columns, a warp keeps those of its
// tile's pairs of groups in shared memory, in the order in which its lanes read them, and copies those of the next item
// beside them meanwhile. Where keys are rows, their biases are two numbers of each lane.
#pragma once

#include <cfloat>

#include "cuda/small/copies.cuh"

namespace natten_jax::small {

/// A bias as it is added to products that are yet to be scaled, given the inverse of their scale. What is too large for
/// a number would hide nothing, and be none beside what hides.
CUTE_DEVICE float key_bias_of_products(float bias, float inverse_scale) {
  return fminf(bias * inverse_scale, FLT_MAX);
}

/// Those of a warp's columns, where `kAreThere`: in one buffer, or in two, of which tables name the one that is read.
template <bool kAreThere, Kernel kKernel>
class ColumnKeyBias {
 public:
  CUTE_DEVICE ColumnKeyBias(const CommonParams& p, Tables& tables, const TilePlan& tile, const Item& first)
      : p_(p), tables_(tables), tile_(tile) {
    if constexpr (kAreThere) {
      // What no window sees has none: additional tokens, and what fills up the last pair.
      const int lane = threadIdx.x % 32;
      for (int i = tile.pairs * 2 * kColumns + lane; i < p.region.table * 2 * kColumns; i += 32) {
        store_word(slots() + 4 * i, 0);
        if constexpr (kHasTwo) store_word(slots() + buffer_bytes() + 4 * i, 0);
      }
      load(first, to_other());
    }
  }

  /// To be called when an item's have come, and those of the one before have been read.
  CUTE_DEVICE void prepare(const Item& item) {
    if constexpr (kAreThere) {
      if (is_new_) {
        tables_.key_bias += to_other();
        is_second_ = !is_second_;
        scale(fast_reciprocal(item.scale(p_).logits));
      }
      if constexpr (kHasTwo) load_behind(item);
    }
  }

  /// To be called when an item's have been read.
  CUTE_DEVICE void leave(const Item& item) {
    if constexpr (kAreThere && !kHasTwo) {
      __syncwarp();
      load_behind(item);
    }
  }

 private:
  static constexpr bool kHasTwo = key_bias_buffers(kKernel) == 2;
  static constexpr int kWord = 4, kWords = 4;  // of a chunk

  CUTE_DEVICE std::uint32_t slots() const { return tables_.key_bias - threadIdx.x % 4 * (kWord * kWords); }
  CUTE_DEVICE int buffer_bytes() const { return p_.region.warps * p_.region.table * kKeyBiasBytes; }
  /// From the buffer that is read to the one that is filled.
  CUTE_DEVICE int to_other() const { return !kHasTwo ? 0 : is_second_ ? -buffer_bytes() : buffer_bytes(); }

  /// Starts to copy those of the next item, unless they are the same.
  CUTE_DEVICE void load_behind(const Item& item) {
    Item next = item;
    next.next(p_);
    is_new_ = !p_.key_bias.is_of_all_heads || p_.scale.heads != nullptr || next.batch != item.batch;
    if (is_new_ && next.number(p_) < p_.items) load(next, to_other());
  }

  CUTE_DEVICE void scale(float inverse_scale) const {
    for (int i = threadIdx.x % 32; i < tile_.pairs * (2 * kColumns / kWords); i += 32) {
      float4& biases = *static_cast<float4*>(__cvta_shared_to_generic(slots() + kWord * kWords * i));
      const float4 own = biases;
      biases = make_float4(key_bias_of_products(own.x, inverse_scale), key_bias_of_products(own.y, inverse_scale),
                           key_bias_of_products(own.z, inverse_scale), key_bias_of_products(own.w, inverse_scale));
    }
    __syncwarp();
  }

  /// Starts to copy an item's into the buffer so many bytes behind the one that is read.
  CUTE_DEVICE void load(const Item& item, int behind) const {
    const bool is_of_all = p_.key_bias.is_of_all_heads;
    const int lane = threadIdx.x % 32, pitch = is_of_all ? 4 : 4 * p_.heads;
    const char* const from = advance(reinterpret_cast<const char*>(p_.key_bias.of_keys), item.of_batch, pitch) +
                             (is_of_all ? 0 : 4 * item.head);
    // A lane reads two columns of each group of a pair at once.
    const int column = lane % kColumns, group = lane / kColumns % 2;
    const std::uint32_t to = slots() + behind + kWord * (column / 2 * kWords + group * 2 + column % 2);
    for (int pair = lane / (2 * kColumns); pair < tile_.pairs; pair += 2) {
      // What a group has outside of the layout is hidden: any number does.
      const int key = tile_.key + static_cast<int>(tables_.entries[pair]);
      copy_word_async(to + pair * kKeyBiasBytes, advance(from, min(max(key, 0), p_.keys - 1), pitch), true);
    }
    commit_copies();
  }

  const CommonParams& p_;
  Tables& tables_;
  const TilePlan& tile_;
  bool is_new_ = true, is_second_ = false;
};

/// Those of a lane's two rows, and their gradients, where `kAreThere`.
template <bool kAreThere>
class RowKeyBias {
 public:
  CUTE_DEVICE RowKeyBias(const CommonParams& p, const int2* row_places) : p_(p), row_places_(row_places) {}

  /// Starts to load an item's.
  CUTE_DEVICE void load(const Item& item) {
    if constexpr (kAreThere) {
      for_rows(item, [&](int r, int key) {
        const float* const from = p_.key_bias.of_keys;
        loaded_[r] = p_.key_bias.is_of_all_heads ? from[key] : from[of_head(item, key)];
      });
    }
  }

  /// What was loaded, as accumulators have their rows: each twice.
  CUTE_DEVICE void take(float (&biases)[4], float scale) const {
    if constexpr (kAreThere) {
      const float inverse_scale = fast_reciprocal(scale);
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) biases[i] = key_bias_of_products(loaded_[i / 2], inverse_scale);
    }
  }

  /// Writes sums of gradients of logits, each of which the lanes of a row have.
  CUTE_DEVICE void store(const Item& item, const float (&sums)[4]) const {
    if constexpr (kAreThere) {
      if (threadIdx.x % 4 > 0) return;
      for_rows(item, [&](int r, int key) { p_.key_bias.gradient[of_head(item, key)] = sums[2 * r]; });
    }
  }

 private:
  /// Calls `call(r, key)` for the rows that are keys.
  template <class Call>
  CUTE_DEVICE void for_rows(const Item& item, const Call& call) const {
    const int2 places = row_places_[threadIdx.x % 32 / 4];
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int place = r == 0 ? places.x : places.y;
      // Places are those of heads of keys.
      if (place >= 0) call(r, item.of_batch + p_.key_bias.by_heads_kv.divide(place));
    }
  }

  CUTE_DEVICE std::int64_t of_head(const Item& item, int key) const { return std::int64_t{key} * p_.heads + item.head; }

  const CommonParams& p_;
  const int2* row_places_;
  float loaded_[2] = {};
};

}  // namespace natten_jax::small
