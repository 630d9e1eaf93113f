// Key biases in kernels with a ring, which initialize products of queries and keys. If keys are columns, loader warps
// store the biases of a slab next to it; if keys are rows, each lane holds two numbers.
#pragma once

#include "cuda/common/arithmetic.cuh"
#include "cuda/small/key_bias.cuh"
#include "cuda/small/ring_strip.cuh"

namespace natten_jax::small {

/// Key biases of a unit's head, divided by the scale, since they are added to unscaled products.
struct RingKeyBiasOfHead {
  const float* of_first_key;
  int pitch;  // distance in numbers from one key's bias to the next
  float inverse_scale;

  CUTE_DEVICE RingKeyBiasOfHead(const RingParams& p, const RingKeyBias& bias, const RingUnit& unit)
      : pitch(bias.is_of_all_heads ? 1 : p.heads),
        inverse_scale(fast_products_per_logit(p.scale.of(unit.batch * p.heads + unit.head).logits)) {
    of_first_key = bias.of_keys + std::int64_t{unit.batch} * p.tokens * pitch + (bias.is_of_all_heads ? 0 : unit.head);
  }

  /// Loads the bias of a key as passed by the caller; returns an arbitrary bias for a negative token.
  CUTE_DEVICE float load(int token) const { return __ldg(of_first_key + std::int64_t{max(token, 0)} * pitch); }
  CUTE_DEVICE float of_products(float bias) const { return bias_in_products(bias, inverse_scale); }
};

/// Stores the biases of slabs. Every lane of the loader warps handles up to two keys of each slab. It loads the biases
/// of the next slab while it waits for a free slot. The keys' positions across strips are computed once per strip.
template <class Params>
class RingKeyBiasLoader {
 public:
  CUTE_DEVICE RingKeyBiasLoader(const Params& p, int warp) : p_(p), first_(32 * warp + threadIdx.x % 32) {}

  /// Computes the positions of a strip's keys.
  CUTE_DEVICE void enter(const RingUnit& unit, const RingStrip<false>& strip) {
    const RingKeyBias& bias = p_.key_bias;
    const RingShape& shape = p_.shape;
    const int wide_shift = logarithm(shape.wide), of_group = shape.group_blocks * kBlockKeys;
    const bool is_thick = shape.thick > 1;
    CUTE_UNROLL
    for (int i = 0; i < kOfLane; ++i) {
      const int key = first_ + i * kLanes, group = key / of_group, line = (key - group * of_group) >> wide_shift;
      const int across = strip.across + group * shape.wide + (key & (shape.wide - 1)),
                inside = strip.inside + (is_thick ? 0 : line);
      const bool is_seen = key < shape.groups * of_group && is_within(across, 0) && is_within(inside, 1);
      token_[i] = is_seen ? across * p_.pitch[0] + inside * p_.pitch[1] : -1;
      behind_[i] = is_thick ? line : 0;
    }
    const RingKeyBiasOfHead of_head(p_, bias, unit);
    of_first_key_ = of_head.of_first_key;
    inverse_scale_ = of_head.inverse_scale;
  }

  /// Starts to load the biases of a slab, given its position along the strip. Keys outside of the layout are hidden:
  /// their biases only have to be finite.
  CUTE_DEVICE void load(int along) {
    const int pitch = p_.key_bias.is_of_all_heads ? 1 : p_.heads;
    CUTE_UNROLL
    for (int i = 0; i < kOfLane; ++i) {
      const int at = along + behind_[i];
      bias_[i] = 0.f;
      if (token_[i] >= 0 && is_within(at, 2)) {
        bias_[i] = __ldg(of_first_key_ + std::int64_t{token_[i] + at * p_.pitch[2]} * pitch);
      }
    }
  }

  /// Waits for the loaded biases, and converts them.
  CUTE_DEVICE void convert() {
    CUTE_UNROLL
    for (int i = 0; i < kOfLane; ++i) converted_[i] = bias_in_products(bias_[i], inverse_scale_);
  }

  /// Stores the converted biases of a slab at an address.
  CUTE_DEVICE void store(std::uint32_t to) const {
    CUTE_UNROLL
    for (int i = 0; i < kOfLane; ++i) {
      const int key = first_ + i * kLanes, column = key % kBlockKeys;
      if (key >= p_.shape.groups * p_.shape.group_blocks * kBlockKeys) break;
      // A lane reads two columns of each half of a block at once.
      const int word = key - column + column % kColumns / 2 * 4 + column / kColumns * 2 + column % 2;
      store_word(to + 4 * word, __float_as_uint(converted_[i]));
    }
  }

 private:
  static constexpr int kLanes = 32 * ring_loaders(RingLoads::kBoxes), kOfLane = kMostBiasedKeys / kLanes;

  CUTE_DEVICE bool is_within(int at, int d) const {
    return static_cast<unsigned>(at) < static_cast<unsigned>(p_.axis[d].kv_extent);
  }

  const Params& p_;
  const int first_;
  const float* of_first_key_;
  float inverse_scale_;
  int token_[kOfLane], behind_[kOfLane];  // a key's token, in a slab that begins at the layout's first token; negative:
                                          // outside in every slab
  float bias_[kOfLane], converted_[kOfLane];
};

/// Loads the biases of the lane's columns of a block from an address, for both rows.
template <bool kAreThere>
CUTE_DEVICE void load_ring_key_biases([[maybe_unused]] float (&x)[2][4], [[maybe_unused]] std::uint32_t at) {
  if constexpr (kAreThere) {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int h = i / 2, r = i % 2;
      asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x[h][2 * r]), "=f"(x[h][2 * r + 1]) : "r"(at + 8 * h));
    }
  }
}

/// Adds biases from global memory to products that are recomputed.
template <bool kAreThere>
struct RingKeyBiasOfColumns {
  CUTE_DEVICE RingKeyBiasOfColumns(const RingParams&, const RingUnit&) {}
  template <class Seen>
  CUTE_DEVICE void add(float (&)[2][4], int, int, const Seen&) const {}
};
template <>
struct RingKeyBiasOfColumns<true> {
  const RingParams& p;
  RingKeyBiasOfHead biases;

  template <class Params>
  CUTE_DEVICE RingKeyBiasOfColumns(const Params& p, const RingUnit& unit) : p(p), biases(p, p.key_bias, unit) {}

  /// Adds the biases of a block at position `across`; `token` is the token at position 0 of that dimension.
  template <class Seen>
  CUTE_DEVICE void add(float (&x)[2][4], int token, int across, const Seen& is_seen) const {
    CUTE_UNROLL
    for (int i = 0; i < 8; ++i) {
      const int at = across + i / 4 * kColumns + threadIdx.x % 4 * 2 + i % 2;
      if (is_seen(i)) x[i / 4][i % 4] += biases.of_products(biases.load(token + at * p.pitch[0]));
    }
  }
};

/// Biases of a lane's two rows and sums of their gradients, if `kAreThere`. Each is stored twice, in accumulator order.
template <bool kAreThere>
struct RingKeyBiasOfRows {
  template <class Params>
  CUTE_DEVICE void start(const Params&, const RingUnit&, const int (&)[2]) const {}
  CUTE_DEVICE float4 of_products() const { return {}; }
  CUTE_DEVICE float of_product(float product, int) const { return product; }
  template <class Element>
  CUTE_DEVICE void add(const std::uint32_t (&)[4]) const {}
  template <class Params>
  CUTE_DEVICE void write(const Params&, const RingUnit&, const int (&)[2]) const {}
};
template <>
struct RingKeyBiasOfRows<true> {
  float biases[4], sums[4];

  template <class Params>
  CUTE_DEVICE void start(const Params& p, const RingUnit& unit, const int (&tokens)[2]) {
    const RingKeyBiasOfHead of_head(p, p.key_bias, unit);
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      biases[2 * r] = of_head.of_products(of_head.load(tokens[r]));
      biases[2 * r + 1] = same_in_another_register(biases[2 * r]);
    }
    CUTE_UNROLL
    for (float& sum : sums) sum = 0.f;
  }

  /// Returns the initial accumulators of the products of rows and columns.
  CUTE_DEVICE float4 of_products() const { return make_float4(biases[0], biases[1], biases[2], biases[3]); }
  /// Adds the bias of the first or second row to a product.
  CUTE_DEVICE float of_product(float product, int row) const { return product + biases[2 * row]; }

  /// Adds up gradients of logits, rounded to the element type for MMA.
  template <class Element>
  CUTE_DEVICE void add(const std::uint32_t (&gradients)[4]) {
    const std::uint32_t ones = pack<Element>(1.f, 1.f);
    HalfInstruction<Element>::fma(sums[0], sums[1], sums[2], sums[3], gradients[0], gradients[1], gradients[2],
                                  gradients[3], ones, ones, sums[0], sums[1], sums[2], sums[3]);
  }

  template <class Params>
  CUTE_DEVICE void write(const Params& p, const RingUnit& unit, const int (&tokens)[2]) const {
    if (threadIdx.x % 4 > 0) return;
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      const std::int64_t key = std::int64_t{unit.batch} * p.tokens + tokens[r];
      if (tokens[r] >= 0) p.key_bias.gradient[key * p.heads + unit.head] = sums[2 * r];
    }
  }
};

}  // namespace natten_jax::small
