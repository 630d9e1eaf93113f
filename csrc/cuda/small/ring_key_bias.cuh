// Key biases in kernels with a ring (ring_shape.h). They initialize the accumulators of products of queries and keys.
// If keys are columns, loader warps store the biases of each slab in shared memory. If keys are rows, each lane holds
// the biases of its two rows in registers.
#pragma once

#include "cuda/common/arithmetic.cuh"
#include "cuda/small/key_bias.cuh"
#include "cuda/small/ring_strip.cuh"

namespace natten_jax::small {

/// Key biases of a unit's head. They are divided by the scale, because they are added to products, which are not
/// scaled.
struct RingKeyBiasOfHead {
  const float* first_bias;
  int pitch;  // distance between the biases of consecutive keys, in numbers
  float inverse_scale;

  CUTE_DEVICE RingKeyBiasOfHead(const RingParams& p, const RingKeyBias& bias, const RingUnit& unit)
      : pitch(bias.is_shared_by_heads ? 1 : p.heads),
        inverse_scale(fast_products_per_logit(p.scale.for_head(unit.batch * p.heads + unit.head).logits)) {
    first_bias = bias.biases + std::int64_t{unit.batch} * p.tokens * pitch + (bias.is_shared_by_heads ? 0 : unit.head);
  }

  /// Returns the bias of a key as passed by the caller. If `token` is negative, returns the first key's bias.
  CUTE_DEVICE float load(int token) const { return __ldg(first_bias + std::int64_t{max(token, 0)} * pitch); }
  CUTE_DEVICE float product_term(float bias) const { return bias_in_products(bias, inverse_scale); }
};

/// Loads the biases of slabs and stores them in shared memory. Every lane of the loader warps handles up to two keys of
/// each slab. While a lane waits for a free slot for a slab, it loads the biases of the next slab. The keys'
/// coordinates in dimensions 0 and 1 of the shape are computed once per unit.
template <class Params>
class RingKeyBiasLoader {
 public:
  CUTE_DEVICE RingKeyBiasLoader(const Params& p, int warp) : p_(p), first_(32 * warp + threadIdx.x % 32) {}

  /// Starts a unit: computes the lane's keys, as tokens in a slab that begins at the first token of the layout.
  CUTE_DEVICE void enter(const RingUnit& unit, const RingStrip<false>& strip) {
    const RingKeyBias& bias = p_.key_bias;
    const RingShape& shape = p_.shape;
    const int wide_shift = logarithm(shape.wide), keys_per_group = shape.group_blocks * kBlockKeys;
    const bool is_thick = shape.thick > 1;
    CUTE_UNROLL
    for (int i = 0; i < kKeysPerLane; ++i) {
      const int key = first_ + i * kLanes, group = key / keys_per_group,
                line = (key - group * keys_per_group) >> wide_shift;
      const int across = strip.across + group * shape.wide + (key & (shape.wide - 1)),
                inside = strip.inside + (is_thick ? 0 : line);
      const bool is_visible = key < shape.groups * keys_per_group && is_within(across, 0) && is_within(inside, 1);
      token_[i] = is_visible ? across * p_.pitch[0] + inside * p_.pitch[1] : -1;
      behind_[i] = is_thick ? line : 0;
    }
    const RingKeyBiasOfHead head_bias(p_, bias, unit);
    first_bias_ = head_bias.first_bias;
    inverse_scale_ = head_bias.inverse_scale;
  }

  /// Starts to load the biases of a slab. `along` is the coordinate of the slab along the strip. Keys outside of the
  /// layout get a bias of zero. Compute warps mask these keys out, so that any finite bias would do.
  CUTE_DEVICE void load(int along) {
    const int pitch = p_.key_bias.is_shared_by_heads ? 1 : p_.heads;
    CUTE_UNROLL
    for (int i = 0; i < kKeysPerLane; ++i) {
      const int at = along + behind_[i];
      bias_[i] = 0.f;
      if (token_[i] >= 0 && is_within(at, 2)) {
        bias_[i] = __ldg(first_bias_ + std::int64_t{token_[i] + at * p_.pitch[2]} * pitch);
      }
    }
  }

  /// Waits for the loaded biases, and converts them to terms of products.
  CUTE_DEVICE void convert() {
    CUTE_UNROLL
    for (int i = 0; i < kKeysPerLane; ++i) converted_[i] = bias_in_products(bias_[i], inverse_scale_);
  }

  /// Stores the converted biases of a slab. `to` is the address of the slab's biases in shared memory.
  CUTE_DEVICE void store(std::uint32_t to) const {
    CUTE_UNROLL
    for (int i = 0; i < kKeysPerLane; ++i) {
      const int key = first_ + i * kLanes, column = key % kBlockKeys;
      if (key >= p_.shape.groups * p_.shape.group_blocks * kBlockKeys) break;
      // A compute lane reads four biases of a block: the biases of two columns in each half. These four biases are
      // stored next to each other.
      const int word = key - column + column % kColumns / 2 * 4 + column / kColumns * 2 + column % 2;
      store_word(to + 4 * word, __float_as_uint(converted_[i]));
    }
  }

 private:
  static constexpr int kLanes = 32 * ring_loaders(RingLoads::kBoxes), kKeysPerLane = kMostBiasedKeys / kLanes;

  CUTE_DEVICE bool is_within(int at, int d) const {
    return static_cast<unsigned>(at) < static_cast<unsigned>(p_.axis[d].kv_extent);
  }

  const Params& p_;
  const int first_;
  const float* first_bias_;
  float inverse_scale_;
  // For each of the lane's keys:
  // - `token_`: its token in a slab that begins at the first token of the layout. Negative if the key is outside of the
  //   layout in every slab.
  // - `behind_`: its coordinate along the strip, relative to the slab.
  int token_[kKeysPerLane], behind_[kKeysPerLane];
  float bias_[kKeysPerLane], converted_[kKeysPerLane];
};

/// If `kAreThere`, loads biases into `x`: for each of the lane's two rows, the biases of the columns of a block that
/// the lane holds. `at` is the address of these biases in shared memory.
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

/// If `kAreThere`, adds biases from global memory to products that are recomputed.
template <bool kAreThere>
struct RingKeyBiasOfColumns {
  CUTE_DEVICE RingKeyBiasOfColumns(const RingParams&, const RingUnit&) {}
  template <class IsVisible>
  CUTE_DEVICE void add(float (&)[2][4], int, int, const IsVisible&) const {}
};
template <>
struct RingKeyBiasOfColumns<true> {
  const RingParams& p;
  RingKeyBiasOfHead biases;

  template <class Params>
  CUTE_DEVICE RingKeyBiasOfColumns(const Params& p, const RingUnit& unit) : p(p), biases(p, p.key_bias, unit) {}

  /// Adds the biases of a block to its visible products. RingTile::for_blocks passes the arguments `token`, `across`
  /// and `is_visible`.
  template <class IsVisible>
  CUTE_DEVICE void add(float (&x)[2][4], int token, int across, const IsVisible& is_visible) const {
    CUTE_UNROLL
    for (int i = 0; i < 8; ++i) {
      const int at = across + i / 4 * kColumns + threadIdx.x % 4 * 2 + i % 2;
      if (is_visible(i)) x[i / 4][i % 4] += biases.product_term(biases.load(token + at * p.pitch[0]));
    }
  }
};

/// If `kAreThere`: biases of a lane's two rows, and sums of the gradients of these biases. Each number is stored twice,
/// in accumulator order.
template <bool kAreThere>
struct RingKeyBiasOfRows {
  template <class Params>
  CUTE_DEVICE void start(const Params&, const RingUnit&, const int (&)[2]) const {}
  CUTE_DEVICE float4 initial_products() const { return {}; }
  CUTE_DEVICE float add_bias(float product, int) const { return product; }
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
    const RingKeyBiasOfHead head_bias(p, p.key_bias, unit);
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      biases[2 * r] = head_bias.product_term(head_bias.load(tokens[r]));
      biases[2 * r + 1] = opaque_copy(biases[2 * r]);
    }
    CUTE_UNROLL
    for (float& sum : sums) sum = 0.f;
  }

  /// Returns the initial accumulators of the products of rows and columns.
  CUTE_DEVICE float4 initial_products() const { return make_float4(biases[0], biases[1], biases[2], biases[3]); }
  /// Adds the bias of the first or second row to a product.
  CUTE_DEVICE float add_bias(float product, int row) const { return product + biases[2 * row]; }

  /// Adds gradients of logits to the rows' sums with MMA. The gradients have been rounded to the element type.
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
