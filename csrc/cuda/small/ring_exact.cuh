// Recomputes tiles from global memory, if the results that were computed with the ring (ring_shape.h) may be
// inaccurate. Few tiles have to be recomputed. The warp of a tile recomputes it while the other warps continue with the
// ring. In the forward pass, softmax weights are recomputed relative to the largest logit of each row.
#pragma once

#include "cuda/small/ring_key_bias.cuh"
#include "cuda/small/ring_strip.cuh"
#include "cuda/small/trusted_sums.cuh"

namespace natten_jax::small {

/// The rows of a warp's tile, and the columns that they see. Columns are multiplied in blocks of 16.
template <class Element, int kHeadDim, bool kRowsAreKeys = false>
class RingTile {
 public:
  CUTE_DEVICE RingTile(const RingParams& p, RingUnit unit, int step) : p_(p), lane_(opaque_number(threadIdx.x % 32)) {
    // These numbers are opaque to the compiler. Otherwise, it would compute values from them early, and keep these
    // values in registers even if nothing is recomputed.
    const int lane = lane_;
    step = opaque_number(step);
    unit.batch = opaque_number(unit.batch);
    unit.head = opaque_number(unit.head);
    int row[kRank];
    first_row(p, unit, ring_warp(), row);
    CUTE_UNROLL
    for (int d = 0; d < kRank; ++d) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        const int coordinate = row_coordinate(p.shape, lane / 4 + 8 * r, d);
        const int at = row[d] + coordinate + (d == 2 ? step * p.shape.rows[2] : 0);
        const Range<int> window = visible_range<kRowsAreKeys>(p.axis[d], at);
        begin_[r][d] = window.begin;
        size_[r][d] = at < p.axis[d].query_extent ? window.end - window.begin : 0;
      }
      const int first = min(begin_[0][d], begin_[1][d]),
                last = max(begin_[0][d] + size_[0][d], begin_[1][d] + size_[1][d]);
      first_[d] = __reduce_min_sync(0xffffffffu, first);
      end_[d] = __reduce_max_sync(0xffffffffu, last);
    }
    const std::int64_t query_row = std::int64_t{unit.batch} * p.tokens * p.heads + unit.head;
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      int token = 0;
      CUTE_UNROLL
      for (int d = 0; d < kRank; ++d) {
        const int at = row[d] + row_coordinate(p.shape, lane / 4 + 8 * r, d) + (d == 2 ? step * p.shape.rows[2] : 0);
        token += min(at, p.axis[d].query_extent - 1) * p.pitch[d];
      }
      row_[r] = (query_row + std::int64_t{token} * p.heads) * kRowBytes;
    }
    kv_ = (std::int64_t{unit.batch} * p.tokens * p.heads_kv + unit.head_kv(p)) * kRowBytes;
  }

  /// Coordinates of the first column of a block: 16 consecutive columns in dimension 0 of the shape. `operator()(i)`
  /// returns true if element `i` of the lane's eight elements is visible.
  struct IsVisible {
    const RingTile& tile;
    int across, inside, along;

    CUTE_DEVICE bool operator()(int i) const {
      const int r = i / 2 % 2, at = across + i / 4 * kColumns + tile.lane_ % 4 * 2 + i % 2;
      return tile.is_within(at, r, 0) && tile.is_within(inside, r, 1) && tile.is_within(along, r, 2);
    }
  };

  /// Calls `call(token, across, is_visible)` for each block of 16 columns. `across` is the coordinate of its first
  /// column in dimension 0. `token` is the token with coordinate 0 in dimension 0, and with the block's coordinates in
  /// the other dimensions. `is_visible` is an IsVisible.
  template <class Call>
  CUTE_DEVICE void for_blocks(const Call& call) const {
    CUTE_NO_UNROLL
    for (int along = first_[2]; along < end_[2]; ++along) {
      CUTE_NO_UNROLL
      for (int inside = first_[1]; inside < end_[1]; ++inside) {
        CUTE_NO_UNROLL
        for (int across = first_[0]; across < end_[0]; across += kBlockKeys) {
          call(along * p_.pitch[2] + inside * p_.pitch[1], across, IsVisible{*this, across, inside, along});
        }
      }
    }
  }

  /// Loads the tile's rows from an array.
  CUTE_DEVICE void load_rows(std::uint32_t (&q)[kHeadDim / 16][4], const void* array) const {
    CUTE_UNROLL
    for (int i = 0; i < kHeadDim / 4; ++i) {
      const char* from = static_cast<const char*>(array) + row_[i % 2] + i / 4 * 32 + i / 2 % 2 * 16 + lane_ % 4 * 4;
      q[i / 4][i % 4] = __ldg(reinterpret_cast<const std::uint32_t*>(from));
    }
  }

  /// Computes the products of the tile's rows with the block's 16 columns in an array.
  CUTE_DEVICE void multiply_keys(float (&x)[2][4], const std::uint32_t (&q)[kHeadDim / 16][4], const void* array,
                                 int token, int across) const {
    const int lane = lane_;
    CUTE_UNROLL
    for (int h = 0; h < 2; ++h) {
      CUTE_UNROLL
      for (int e = 0; e < 4; ++e) x[h][e] = 0.f;
      const int at = across + kColumns * h + lane / 4;
      CUTE_UNROLL
      for (int step = 0; step < kHeadDim / 16; ++step) {
        std::uint32_t b[2] = {};
        if (at < end_[0]) {
          const char* from = row(array, token, at) + 32 * step + lane % 4 * 4;
          b[0] = __ldg(reinterpret_cast<const std::uint32_t*>(from));
          b[1] = __ldg(reinterpret_cast<const std::uint32_t*>(from + 16));
        }
        multiply(x[h], q[step], b);
      }
    }
  }

  /// Multiplies weights by the block's 16 columns in an array, and adds the products to `o`.
  CUTE_DEVICE void add_keys(float (&o)[kHeadDim / 2], const std::uint32_t (&weights)[4], const void* array, int token,
                            int across) const {
    const int lane = lane_;
    CUTE_UNROLL
    for (int n = 0; n < kHeadDim / 8; ++n) {
      std::uint32_t b[2];
      CUTE_UNROLL
      for (int h = 0; h < 2; ++h) {
        b[h] = 0;
        CUTE_UNROLL
        for (int e = 0; e < 2; ++e) {
          const int at = across + kColumns * h + lane % 4 * 2 + e;
          if (at >= end_[0]) continue;
          const char* from = row(array, token, at) + 2 * (8 * n + lane / 4);
          b[h] |= static_cast<std::uint32_t>(__ldg(reinterpret_cast<const std::uint16_t*>(from))) << (16 * e);
        }
      }
      float (&c)[4] = *reinterpret_cast<float (*)[4]>(o + 4 * n);
      multiply(c, weights, b);
    }
  }

 private:
  static constexpr int kRowBytes = 2 * kHeadDim;

  CUTE_DEVICE bool is_within(int at, int r, int d) const {
    return static_cast<unsigned>(at - begin_[r][d]) < static_cast<unsigned>(size_[r][d]);
  }

  CUTE_DEVICE const char* row(const void* array, int token, int across) const {
    return static_cast<const char*>(array) + kv_ +
           static_cast<std::int64_t>(token + across * p_.pitch[0]) * (p_.heads_kv * kRowBytes);
  }

  CUTE_DEVICE static void multiply(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
    HalfInstruction<Element>::fma(d[0], d[1], d[2], d[3], a[0], a[1], a[2], a[3], b[0], b[1], d[0], d[1], d[2], d[3]);
  }

  const RingParams& p_;
  int lane_;
  std::int64_t row_[2], kv_;  // byte offsets in an array: of the lane's rows, and of the head's first column
  int begin_[2][kRank], size_[2][kRank], first_[kRank], end_[kRank];
};

/// Recomputes a tile's softmax sums and weighted values. Weights are relative to the largest logit of each row.
template <class Element, int kHeadDim, class Biases>
CUTE_DEVICE void compute_ring_exactly(float (&o)[kHeadDim / 2], float (&sum)[2], float (&shift)[2], const RingParams& p,
                                      const RingTile<Element, kHeadDim>& keys, const Biases& biases, float factor) {
  std::uint32_t q[kHeadDim / 16][4];
  keys.load_rows(q, p.query);
  float largest[2] = {-INFINITY, -INFINITY};
  keys.for_blocks([&](int token, int across, const auto& is_visible) {
    float x[2][4];
    keys.multiply_keys(x, q, p.key, token, across);
    biases.add(x, token, across, is_visible);
    CUTE_UNROLL
    for (int i = 0; i < 8; ++i) {
      if (is_visible(i)) largest[i / 2 % 2] = fmaxf(largest[i / 2 % 2], x[i / 4][i % 4]);
    }
  });
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    largest[r] = largest_of_row(largest[r]);
    if (largest[r] == -INFINITY) largest[r] = 0.f;
    shift[r] = largest[r];
    sum[r] = 0.f;
  }
  CUTE_UNROLL
  for (int i = 0; i < kHeadDim / 2; ++i) o[i] = 0.f;
  keys.for_blocks([&](int token, int across, const auto& is_visible) {
    float x[2][4];
    keys.multiply_keys(x, q, p.key, token, across);
    biases.add(x, token, across, is_visible);
    std::uint32_t weights[4];
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      float both[2];
      CUTE_UNROLL
      for (int e = 0; e < 2; ++e) {
        // Select zero, instead of adding a large negative number to the exponent: logits of hidden (masked out) keys
        // may be infinite or NaN.
        const float logit = x[i / 2][i % 2 * 2 + e];
        both[e] = is_visible(2 * i + e) ? fast_exp2((logit - largest[i % 2]) * factor) : 0.f;
      }
      weights[i] = pack<Element>(both[0], both[1]);
      sum[i % 2] += both[0] + both[1];
    }
    keys.add_keys(o, weights, p.value, token, across);
  });
}

}  // namespace natten_jax::small
