// Query gradients with a ring of keys and values (ring_shape.h). As in the forward pass, a warp owns 16 queries. The
// kernel also computes the statistics of queries, which the kernel of key and value gradients reads.
#pragma once

#include "cuda/small/query_gradient.cuh"
#include "cuda/small/ring_exact.cuh"
#include "cuda/small/ring_run.cuh"
#include "cuda/small/ring_store.cuh"

namespace natten_jax::small {

/// Query gradients of a compute warp. RingReader::walk calls its functions.
template <class Element, int kHeadDim, int kForm, RingLoads kLoads, RingBiases kBiases>
struct RingQueryGradient {
  using Params = RingParamsOf<RingQueryParams, kBiases>;
  using Masks = RingMasks<kForm>;
  using Reader = RingReader<Element, kHeadDim, Params, Masks, kLoads>;
  using Operand = RowOperand<Element, kHeadDim>;
  static constexpr bool kHasKeyBias = kBiases == RingBiases::kKey;
  static constexpr int kBlocks = Masks::kBlocks;
  static constexpr int kAtOnce = 2;  // number of blocks whose instructions are interleaved to hide latency

  const Params& p;
  Reader& reader;
  Operand queries, cotangents;
  float gradient[kHeadDim / 8][4];
  float logsumexp[2], delta[4];
  bool is_large;
  LateSteps<kLoads> large;  // deferred steps: the logsumexp of a query has a significant remainder
  float factor;

  CUTE_DEVICE RingQueryGradient(const Params& p, Reader& reader) : p(p), reader(reader) {}

  CUTE_DEVICE void enter(const RingUnit& unit) {
    factor = p.scale.for_head(unit.batch * p.heads + unit.head).logits * kLog2E;
  }

  CUTE_DEVICE void start(const RingUnit& unit, int step, int2) {
    int tokens[2];
    std::int64_t at[2];
    float cotangent[2] = {};
    reader.masks.find_tokens(p, step, tokens);
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      at[r] = number_of(unit, tokens[r]);
      logsumexp[r] = tokens[r] >= 0 ? p.logsumexp[at[r]] : 0.f;
      if (tokens[r] >= 0 && p.logsumexp_cotangent != nullptr) cotangent[r] = p.logsumexp_cotangent[at[r]];
    }
    queries = reader.load_tile(0);
    cotangents = reader.load_tile(1);
    const Operand outs = reader.load_tile(2);
    multiply_rows(delta, cotangents, outs);
    reader.release_tile(Reader::loaded(queries) | Reader::loaded(cotangents) | Reader::loaded(outs));
    bool has_large = false;
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      logsumexp[r] = base2_logsumexp(logsumexp[r]);
      // If biases hide (mask out) all keys in the query's window, the logsumexp is -infinity. With +infinity instead,
      // all weights become zero.
      if (kHasKeyBias && logsumexp[r] == -INFINITY) logsumexp[r] = INFINITY;
      delta[2 * r] -= cotangent[r];
      delta[2 * r + 1] -= cotangent[r];
      float remainder = 0.f;
      const bool is_row_large = has_remainder<Element>(logsumexp[r]);
      has_large |= is_row_large;
      if (is_row_large && p.remainder != nullptr && tokens[r] >= 0) remainder = p.remainder[at[r]];
      if (threadIdx.x % 4 == 0 && tokens[r] >= 0) {
        p.statistics[at[r]] = make_float4(is_row_large ? NAN : logsumexp[r], delta[2 * r], logsumexp[r], remainder);
      }
    }
    is_large = __any_sync(0xffffffffu, has_large);
    CUTE_UNROLL
    for (int i = 0; i < kHeadDim / 2; ++i) gradient[i / 4][i % 4] = 0.f;
  }

  /// Updates the tile's gradient with the keys of a slab that the tile's queries see.
  CUTE_DEVICE void add(std::uint32_t slab, std::uint32_t hidden_of_slab) { add_blocks<0>(slab, hidden_of_slab); }

  template <int kFirst>
  CUTE_DEVICE void add_blocks(std::uint32_t slab, std::uint32_t hidden_of_slab) {
    constexpr int kCount = kBlocks - kFirst < kAtOnce ? kBlocks - kFirst : kAtOnce;
    if constexpr (kCount > 0) {
      std::uint32_t key_addresses[kCount], value_addresses[kCount];
      CUTE_UNROLL
      for (int b = 0; b < kCount; ++b) {
        key_addresses[b] = reader.across + slab + reader.block_offset(kFirst + b);
        value_addresses[b] = key_addresses[b] + p.shape.array_bytes;
      }
      float x[kCount][2][4], y[kCount][2][4];
      CUTE_UNROLL
      for (int b = 0; b < kCount; ++b) {
        load_ring_key_biases<kHasKeyBias>(x[b], reader.statistics_of(slab, reader.block_offset(kFirst + b)));
      }
      reader.template multiply_blocks<kHasKeyBias>(x, queries, key_addresses, {});
      reader.multiply_blocks(y, cotangents, value_addresses, make_float4(-delta[0], -delta[1], -delta[2], -delta[3]));
      std::uint32_t a[kCount][4];
      CUTE_UNROLL
      for (int b = 0; b < kCount; ++b) {
        const std::uint32_t hidden = reader.masks.inside[kFirst + b] | hidden_of_slab;
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) {
          const int h = i / 2, r = i % 2;
          float both[2];
          CUTE_UNROLL
          for (int e = 0; e < 2; ++e) {
            both[e] = fast_exp2(fmaf(x[b][h][2 * r + e], factor, -logsumexp[r])) * y[b][h][2 * r + e];
          }
          a[b][i] = pack<Element>(both[0], both[1]) & ~hidden_halves(masks_of_group(hidden, h), r);
        }
      }
      CUTE_UNROLL
      for (int b = 0; b < kCount; ++b) {
        reader.add_block(gradient, a[b], reader.along_rows + slab + reader.block_offset(kFirst + b));
      }
      add_blocks<kFirst + kCount>(slab, hidden_of_slab);
    }
  }

  CUTE_DEVICE void finish(const RingUnit& unit, int step) {
    if (is_large) {
      large.add(step - unit.step);
      return;
    }
    int tokens[2];
    reader.masks.find_tokens(p, step, tokens);
    const float scale = p.scale.for_head(unit.batch * p.heads + unit.head).query_gradient;
    write_ring_rows<Element, kHeadDim>(p, p.query_gradient, unit, tokens, gradient, {scale, scale});
  }

  CUTE_DEVICE void finish_unit(const RingUnit& unit) {
    large.for_each([&](int index) { finish_large(unit, unit.step + index); });
  }

  /// Recomputes a deferred step from global memory, with the remainders, and writes its gradient.
  CUTE_DEVICE void finish_large(const RingUnit& unit, int step) {
    int tokens[2];
    reader.masks.enter_step(p, reader.along, step);
    reader.masks.find_tokens(p, step, tokens);
    const float scale = p.scale.for_head(unit.batch * p.heads + unit.head).query_gradient;
    float4 rows[2];
    __syncwarp();  // the statistics were written by other lanes
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      rows[r] = tokens[r] >= 0 ? __ldcg(p.statistics + number_of(unit, tokens[r])) : float4{};
    }
    const RingTile<Element, kHeadDim> keys(p, unit, step);
    std::uint32_t q[kHeadDim / 16][4], c[kHeadDim / 16][4];
    keys.load_rows(q, p.query);
    keys.load_rows(c, p.out_cotangent);
    float sums[kHeadDim / 2] = {};
    const RingKeyBiasOfColumns<kHasKeyBias> biases(p, unit);
    keys.for_blocks([&](int token, int across, const auto& is_visible) {
      float x[2][4], y[2][4];
      keys.multiply_keys(x, q, p.key, token, across);
      biases.add(x, token, across, is_visible);
      keys.multiply_keys(y, c, p.value, token, across);
      std::uint32_t a[4];
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        const float4 row = rows[i % 2];
        float both[2];
        CUTE_UNROLL
        for (int e = 0; e < 2; ++e) {
          const float logit = x[i / 2][i % 2 * 2 + e], weight_gradient = y[i / 2][i % 2 * 2 + e] - row.y;
          both[e] = is_visible(2 * i + e) ? weight_of_large(logit, factor, row.z, row.w) * weight_gradient : 0.f;
        }
        a[i] = pack<Element>(both[0], both[1]);
      }
      keys.add_keys(sums, a, p.key, token, across);
    });
    write_ring_rows_in_words<Element, kHeadDim>(p, p.query_gradient, unit, tokens, sums, {scale, scale});
  }

  /// Returns the index of a query in arrays with one element per batch entry, token and head.
  CUTE_DEVICE std::int64_t number_of(const RingUnit& unit, int token) const {
    return (std::int64_t{unit.batch} * p.tokens + token) * p.heads + unit.head;
  }
};

template <class Element, int kHeadDim, int kForm, RingLoads kLoads, RingBiases kBiases>
__global__ void __launch_bounds__(ring_threads(kLoads, kHeadDim), 1)
    natten_jax_small_ring_query_gradient(const __grid_constant__ RingParamsOf<RingQueryParams, kBiases> p) {
  run_ring<kLoads, kHeadDim, RingQueryGradient<Element, kHeadDim, kForm, kLoads, kBiases>>(p);
}

}  // namespace natten_jax::small
