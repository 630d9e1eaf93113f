// Key and value gradients with a ring of queries (ring_shape.h). A warp owns 16 keys. Slabs have queries, dO and the
// queries' statistics. Each query head has to have a separate key/value head.
#pragma once

#include "cuda/small/key_value_gradient.cuh"
#include "cuda/small/ring_bias.cuh"
#include "cuda/small/ring_exact.cuh"
#include "cuda/small/ring_run.cuh"
#include "cuda/small/ring_store.cuh"

namespace natten_jax::small {

CUTE_DEVICE std::uint32_t load_byte(std::uint32_t address) {
  std::uint32_t result;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(result) : "r"(address) : "memory");
  return result;
}

/// Key and value gradients of a compute warp. RingReader::walk calls its functions.
template <class Element, int kHeadDim, RingLoads kLoads, RingBiases kBiases>
struct RingKeyValueGradient {
  static constexpr bool kHasBias = kBiases == RingBiases::kRelative;
  using Params = RingParamsOf<RingGradientParams, kBiases>;
  using Reader = RingReader<Element, kHeadDim, Params, RingTable, kLoads>;
  using Operand = RowOperand<Element, kHeadDim>;

  const Params& p;
  Reader& reader;
  Operand keys, values;
  float key_sums[kHeadDim / 8][4], value_sums[kHeadDim / 8][4];
  float factor;
  LateSteps<kLoads> large;  // deferred steps: they see queries whose logsumexp has a significant remainder
  RingRelativeBias<Params, kHasBias> bias;
  RingKeyBiasOfRows<kBiases == RingBiases::kKey> key_bias;

  CUTE_DEVICE RingKeyValueGradient(const Params& p, Reader& reader)
      : p(p), reader(reader), factor(p.exponent_scale), bias(p, reader.shared) {}

  CUTE_DEVICE void enter(const RingUnit& unit) {
    if (p.scale.heads != nullptr) factor = p.scale.for_head(unit.batch * p.heads + unit.head).logits * kLog2E;
    bias.enter(unit, reader.masks);
  }

  CUTE_DEVICE void start(const RingUnit& unit, int step, int2 slabs) {
    bias.start(step, reader.along.first_key(slabs.x));
    int tokens[2];
    reader.masks.find_tokens(p, step, tokens);
    key_bias.start(p, unit, tokens);
    load_rows(keys, p.key, unit, tokens);
    load_rows(values, p.value, unit, tokens);
    CUTE_UNROLL
    for (int i = 0; i < kHeadDim / 2; ++i) key_sums[i / 4][i % 4] = value_sums[i / 4][i % 4] = 0.f;
  }

  /// Loads the tile's rows from an array. For negative tokens, loads the head's first row.
  CUTE_DEVICE void load_rows(Operand& rows, const void* array, const RingUnit& unit, const int (&tokens)[2]) const {
    const char* row[2];
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      row[r] = ring_row<kHeadDim>(p, static_cast<const char*>(array), unit, max(tokens[r], 0)) + threadIdx.x % 4 * 4;
    }
    CUTE_UNROLL
    for (int i = 0; i < kHeadDim / 4; ++i) {
      const char* const from = row[i % 2] + i / 4 * 32 + i / 2 % 2 * 16;
      rows.a[i / 4].r[i % 4] = __ldg(reinterpret_cast<const std::uint32_t*>(from));
    }
  }

  /// Updates the sums of both gradients with the queries of a slab that see the tile's keys.
  CUTE_DEVICE void add(std::uint32_t slab, std::uint32_t hidden_of_slab) {
    const RingTable& masks = reader.masks;
    std::uint32_t table = masks.table, block = 0;
    int remaining = masks.inner;
    auto biases = bias.slab_biases();
    CUTE_NO_UNROLL
    for (int i = masks.blocks; i > 0; --i, table += 32) {
      add_block(slab + block, reader.statistics_of(slab, block), biases,
                spread_bits(load_byte(table)) | hidden_of_slab);
      block += Reader::kBlockBytes;
      biases.next_block();
      if (--remaining == 0) {
        remaining = masks.inner;
        block += reader.group_bytes - masks.inner * Reader::kBlockBytes;
        biases.next_group(masks.inner);
      }
    }
    bias.next_slab();
  }

  template <class Biases>
  CUTE_DEVICE void add_block(std::uint32_t block, std::uint32_t statistics, const Biases& biases,
                             std::uint32_t hidden) {
    const std::uint32_t query_addresses[] = {reader.across + block},
                        cotangent_addresses[] = {reader.across + p.shape.array_bytes + block};
    float products[2][1][2][4];
    biases.load(products[0][0]);
    reader.template multiply_blocks<kHasBias>(products[0], keys, query_addresses, key_bias.initial_products());
    reader.multiply_blocks(products[1], values, cotangent_addresses, {});
    const auto &x = products[0][0], &y = products[1][0];
    std::uint32_t a[4], b[4];
    CUTE_UNROLL
    for (int h = 0; h < 2; ++h) {
      const std::uint32_t at = statistics + h * kColumns * kStatisticsBytes;
      const float2 first = load_statistic(at), second = load_statistic(at + kStatisticsBytes);
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        const std::uint32_t visible = ~hidden_halves(masks_of_group(hidden, h), r);
        const float low = fast_exp2(fmaf(x[h][2 * r], factor, -first.x)),
                    high = fast_exp2(fmaf(x[h][2 * r + 1], factor, -second.x));
        a[2 * h + r] = pack<Element>(low, high) & visible;
        b[2 * h + r] = pack<Element>(low * (y[h][2 * r] - first.y), high * (y[h][2 * r + 1] - second.y)) & visible;
      }
    }
    reader.add_block(value_sums, a, reader.along_rows + p.shape.array_bytes + block);
    reader.add_block(key_sums, b, reader.along_rows + block);
    key_bias.template add<Element>(b);
  }

  /// Writes a step's gradients. If they are NaN, a query's logsumexp has a significant remainder, and the step is
  /// deferred.
  CUTE_DEVICE void finish(const RingUnit& unit, int step) {
    if (__any_sync(0xffffffffu, isnan(value_sums[0][0]) || isnan(value_sums[0][2]))) {
      large.add(step - unit.step);
      return;
    }
    int tokens[2];
    reader.masks.find_tokens(p, step, tokens);
    const float scale = p.scale.for_head(unit.batch * p.heads + unit.head).logits;
    write_ring_rows<Element, kHeadDim>(p, p.key_gradient, unit, tokens, key_sums, {scale, scale});
    write_ring_rows<Element, kHeadDim>(p, p.value_gradient, unit, tokens, value_sums, {1.f, 1.f});
    key_bias.write(p, unit, tokens);
  }

  CUTE_DEVICE void finish_unit(const RingUnit& unit) {
    large.for_each([&](int index) { finish_large(unit, unit.step + index); });
  }

  /// Recomputes a deferred step from global memory, with the remainders, and writes its gradients.
  CUTE_DEVICE void finish_large(const RingUnit& unit, int step) {
    int tokens[2];
    reader.masks.enter_step(p, reader.along, step);
    reader.masks.find_tokens(p, step, tokens);
    const RingTile<Element, kHeadDim, true> tile(p, unit, step);
    const float4* const statistics = p.statistics + std::int64_t{unit.batch} * p.tokens * p.heads + unit.head;
    std::uint32_t k[kHeadDim / 16][4], v[kHeadDim / 16][4];
    tile.load_rows(k, p.key);
    tile.load_rows(v, p.value);
    float sums[2][kHeadDim / 2] = {};
    const auto biases = bias.step_biases(unit, step);
    RingKeyBiasOfRows<kBiases == RingBiases::kKey> biases_of_rows;
    biases_of_rows.start(p, unit, tokens);
    tile.for_blocks([&](int token, int across, const auto& is_visible) {
      float x[2][4], y[2][4];
      tile.multiply_keys(x, k, p.query, token, across);
      tile.multiply_keys(y, v, p.out_cotangent, token, across);
      std::uint32_t a[4], b[4];
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int h = i / 2, r = i % 2;
        float weights[2], gradients[2];
        CUTE_UNROLL
        for (int e = 0; e < 2; ++e) {
          weights[e] = gradients[e] = 0.f;
          if (!is_visible(2 * i + e)) continue;
          const int at = across + h * kColumns + threadIdx.x % 4 * 2 + e;
          const float4 query = __ldcg(statistics + std::int64_t{token + at * p.pitch[0]} * p.heads);
          const float product = biases_of_rows.add_bias(x[h][2 * r + e], r);
          const float logit = biases.add(product, r, {at, is_visible.inside, is_visible.along});
          weights[e] = weight_of_large(logit, factor, query.z, query.w);
          gradients[e] = weights[e] * (y[h][2 * r + e] - query.y);
        }
        a[i] = pack<Element>(weights[0], weights[1]);
        b[i] = pack<Element>(gradients[0], gradients[1]);
      }
      biases_of_rows.template add<Element>(b);
      tile.add_keys(sums[0], b, p.query, token, across);
      tile.add_keys(sums[1], a, p.out_cotangent, token, across);
    });
    const float scale = p.scale.for_head(unit.batch * p.heads + unit.head).logits;
    write_ring_rows_in_words<Element, kHeadDim>(p, p.key_gradient, unit, tokens, sums[0], {scale, scale});
    write_ring_rows_in_words<Element, kHeadDim>(p, p.value_gradient, unit, tokens, sums[1], {1.f, 1.f});
    biases_of_rows.write(p, unit, tokens);
  }
};

template <class Element, int kHeadDim, RingLoads kLoads, RingBiases kBiases>
__global__ void __launch_bounds__(ring_threads(kLoads, kHeadDim), 1)
    natten_jax_small_ring_key_value_gradient(const __grid_constant__ RingParamsOf<RingGradientParams, kBiases> p) {
  run_ring<kLoads, kHeadDim, RingKeyValueGradient<Element, kHeadDim, kLoads, kBiases>>(p);
}

}  // namespace natten_jax::small
