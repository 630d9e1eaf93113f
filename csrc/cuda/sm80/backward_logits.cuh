// Logits (S), weights (P) and their gradients (dS and dP) in a step of the backward kernel. Rows are keys, and columns
// are queries.
#pragma once

#include "cuda/common/arithmetic.cuh"
#include "cuda/sm80/backward_key_bias.cuh"
#include "cuda/sm80/backward_traits.cuh"
#include "cuda/warp/mma.cuh"
#include "natten_jax/logsumexp.h"

namespace natten_jax::sm80 {

/// The rows and columns of the logits that a warp computes. Logits and gradients are arguments of the methods instead
/// of members, so that they stay in registers.
template <class Traits>
struct LogitTile {
  using Element = typename Traits::Element;
  using Product = typename Traits::Product;
  using Tile = typename Traits::Tile;
  using WeightTile = typename Traits::WeightTile;
  static constexpr int kRows = Traits::kLogitRows, kColumns = Traits::kLogitColumns;
  using Accumulator = float[kRows / 16][kColumns / 8][4];

  const BackwardParams& p;
  typename Traits::SharedStorage& shared;
  const int lane, lane4, key0, query0;

  CUTE_DEVICE LogitTile(const BackwardParams& p, typename Traits::SharedStorage& shared)
      : p(p),
        shared(shared),
        lane(threadIdx.x % 32),
        lane4(lane % 4),
        key0(threadIdx.x / 32 / Traits::LogitWarps::kColumnWarps * kRows),
        query0(threadIdx.x / 32 % Traits::LogitWarps::kColumnWarps * kColumns) {}

  /// Computes a step's weights and dS and writes them to shared memory. With key biases, also adds dS to `bias_sums`.
  CUTE_DEVICE void compute(const QueryStep& step, const KeyHead& own, int stage, BiasSumsOf<Traits>& bias_sums) const {
    Accumulator s = {}, d_weight = {};
    if constexpr (Traits::kHasKeyBias) start_at_biases(s);
    // `has_large` loads logsumexps from shared memory for a warp vote. Because it is called before the products, its
    // loads overlap with them. After the products, the vote would wait for these loads.
    const bool any_large = has_large(stage);
    multiply(s, shared.k, shared.q[stage]);
    // A branch, so that steps without large logsumexps do not wait for loads of remainders.
    if (any_large) subtract_large(s, step, own, stage);
    weigh(s, any_large, own, stage);
    multiply(d_weight, shared.v, shared.d_out[stage]);  // the compiler interleaves these products with `weigh`
    const bool is_whole = step.column + Traits::kQueries <= p.q_tile_tokens &&
                          step.walk.is_inside(p.axis, shared.inner_begin, shared.inner_end);
    subtract_delta(d_weight, stage);
    if (!is_whole) mask(s, step);
    store(s, d_weight, bias_sums);
  }

 private:
  /// True if at least one of the warp's queries has a logsumexp so large that weights need its remainder
  /// (natten_jax/logsumexp.h).
  CUTE_DEVICE bool has_large(int stage) const {
    bool result = false;
    CUTE_UNROLL
    for (int first = 0; first < kColumns; first += 32) {
      result |= has_remainder<Element>(shared.logsumexp[stage][query0 + first + lane % min(kColumns, 32)]);
    }
    return __any_sync(0xffffffffu, result);
  }

  CUTE_DEVICE void start_at_biases(Accumulator& s) const {
    CUTE_UNROLL
    for (int i = 0; i < kRows / 8; ++i) {
      const float bias = shared.key_bias[key0 + lane / 4 + 8 * i];
      CUTE_UNROLL
      for (int n = 0; n < kColumns / 8; ++n) s[i / 2][n][i % 2 * 2] = s[i / 2][n][i % 2 * 2 + 1] = bias;
    }
  }

  CUTE_DEVICE void multiply(Accumulator& c, const char* a_tile, const char* b_tile) const {
    const typename Product::template ReadA<Tile> read_a(shared_address(a_tile), key0);
    const typename Product::template ReadB<Tile> read_b(shared_address(b_tile), query0);
    accumulate<Product, kRows / 16, kColumns / 16, Traits::kHeadDim / Product::kStep, true>(
        c, [&](auto& a, int m, int i) __attribute__((always_inline)) { read_a(a, 16 * m, i); },
        [&](auto& b, int n, int i) __attribute__((always_inline)) { read_b(b, 16 * n, i); });
  }

  /// Replaces each logit by the exponent of its weight in base 2. Subtracts remainders of large logsumexps.
  CUTE_DEVICE void subtract_large(Accumulator& s, const QueryStep& step, const KeyHead& own, int stage) const {
    const TokenBox& box = shared.box;
    const QueryWalk& at = step.walk;
    const float exponent_scale = own.scale(p).logits * kLog2E;
    // Not unrolled, because unrolled code would take registers from the rest of the kernel. A variable cannot index
    // registers, so every iteration processes the first block of eight columns and then rotates all blocks by one.
#pragma unroll 1
    for (int n = 0; n < kColumns / 8; ++n) {
      float exponents[kRows / 16][4];
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) {
        const int column = query0 + 8 * n + 2 * lane4 + i, row = step.column + column;
        const float logsumexp = shared.logsumexp[stage][column];
        float remainder = 0.f;
        if (p.remainder != nullptr && has_remainder<Element>(logsumexp) &&
            shared.rows.is_visible(PackedPosition::ends(box.end, at.x, at.y, at.z), row)) {
          const std::int64_t token = box.token(at.x, at.y, at.z) + shared.rows.token(row);
          remainder = p.remainder[(own.batch * p.queries + token) * p.heads + own.query_head(step)];
        }
        CUTE_UNROLL
        for (int m = 0; m < kRows / 16; ++m) {
          CUTE_UNROLL
          for (int e = i; e < 4; e += 2) {
            exponents[m][e] = exponent_of_large(s[m][0][e], exponent_scale, base2_logsumexp(logsumexp), remainder);
          }
        }
      }
      CUTE_UNROLL
      for (int m = 0; m < kRows / 16; ++m) {
        CUTE_UNROLL
        for (int e = 0; e < 4; ++e) {
          CUTE_UNROLL
          for (int j = 1; j < kColumns / 8; ++j) s[m][j - 1][e] = s[m][j][e];
          s[m][kColumns / 8 - 1][e] = exponents[m][e];
        }
      }
    }
  }

  /// Replaces logits by weights. If `are_exponents`, `subtract_large` has already replaced the logits by exponents.
  CUTE_DEVICE void weigh(Accumulator& s, bool are_exponents, const KeyHead& own, int stage) const {
    const float exponent_scale = are_exponents ? 1.f : own.scale(p).logits * kLog2E;
    CUTE_UNROLL
    for (int n = 0; n < kColumns / 8; ++n) {
      const float2 lse = *reinterpret_cast<const float2*>(&shared.logsumexp[stage][query0 + 8 * n + 2 * lane4]);
      const float shift[2] = {are_exponents ? 0.f : base2_logsumexp(lse.x),
                              are_exponents ? 0.f : base2_logsumexp(lse.y)};
      CUTE_UNROLL
      for (int m = 0; m < kRows / 16; ++m) {
        CUTE_UNROLL
        for (int e = 0; e < 4; ++e) s[m][n][e] = fast_exp2(s[m][n][e] * exponent_scale - shift[e % 2]);
      }
    }
  }

  CUTE_DEVICE void subtract_delta(Accumulator& d_weight, int stage) const {
    CUTE_UNROLL
    for (int n = 0; n < kColumns / 8; ++n) {
      const float2 delta = *reinterpret_cast<const float2*>(&shared.delta[stage][query0 + 8 * n + 2 * lane4]);
      CUTE_UNROLL
      for (int m = 0; m < kRows / 16; ++m) {
        CUTE_UNROLL
        for (int e = 0; e < 4; ++e) d_weight[m][n][e] -= e % 2 == 0 ? delta.x : delta.y;
      }
    }
  }

  /// Replaces masked weights by zero. A weight is masked if the query does not attend to the key.
  CUTE_DEVICE void mask(Accumulator& s, const QueryStep& step) const {
    const LaneMask<QueryColumnMask> lane_mask(QueryColumnMask(shared.mask_words, p.axis), lane4);
    const int4 first = make_int4(step.walk.x, step.walk.y, step.walk.z, 0);
    constexpr int kHalf = kRows / 16;
    std::uint32_t visible[2][kHalf] = {};  // initialized, because it would otherwise occupy registers between steps
    // Not unrolled: the compiler would predicate unrolled instructions, so steps without a mask would not skip them.
#pragma unroll 1
    for (int half = 1; half >= 0; --half) {
      CUTE_UNROLL
      for (int i = 0; i < kHalf; ++i) {
        const int4* window = shared.row_windows[key0 + lane / 4 + 8 * (half * kHalf + i)];
        visible[1][i] = visible[0][i];
        visible[0][i] = lane_mask.row(p.axis, window[0], window[1], first) >> (step.column + query0) / 4;
      }
    }
    CUTE_UNROLL
    for (int i = 0; i < kRows / 8; ++i) {
      CUTE_UNROLL
      for (int e = 0; e < kColumns / 4; ++e) {
        if (!(visible[i / kHalf][i % kHalf] & 1u << e)) s[i / 2][e / 2][i % 2 * 2 + e % 2] = 0.f;
      }
    }
  }

  CUTE_DEVICE void store(const Accumulator& s, const Accumulator& d_weight, BiasSumsOf<Traits>& bias_sums) const {
    const std::uint32_t weights = shared_address(shared.weights), d_logits = shared_address(shared.d_logits);
    CUTE_UNROLL
    for (int i = 0; i < kRows / 8; ++i) {
      const int row = key0 + lane / 4 + 8 * i;
      CUTE_UNROLL
      for (int n = 0; n < kColumns / 8; ++n) {
        const int byte = (query0 + 8 * n + 2 * lane4) * static_cast<int>(sizeof(Element));
        const std::uint32_t offset = WeightTile::offset(row, byte / 16) + byte % 16;
        const float* w = &s[i / 2][n][i % 2 * 2];
        const float* d = &d_weight[i / 2][n][i % 2 * 2];
        Product::store_pair(weights + offset, w[0], w[1]);
        const float d_logit[2] = {w[0] * d[0], w[1] * d[1]};
        Product::store_pair(d_logits + offset, d_logit[0], d_logit[1]);
        if constexpr (Traits::kHasKeyBias) bias_sums.row_sums[i] += d_logit[0] + d_logit[1];
      }
    }
  }
};

}  // namespace natten_jax::sm80
