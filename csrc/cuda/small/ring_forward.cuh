// Forward neighborhood attention with a ring of keys and values (ring_shape.h). A CTA moves along a strip of the
// layout. A few loader warps prefetch slabs of keys and values. Each compute warp owns 16 queries, and processes the
// keys and values of each slab that these queries see. Compute warps wait for each other only to fill the tables of a
// relative bias. Before loader warps reuse the memory of a slab, they wait until all compute warps have released the
// slab.
//
// Softmax weights are computed relative to a fixed reference logit instead of the maximum, as in forward.cuh. The
// reference is 0 in bfloat16. In float16, it is a logit in the middle of the window.
#pragma once

#include "cuda/small/ring_bias.cuh"
#include "cuda/small/ring_exact.cuh"
#include "cuda/small/ring_run.cuh"
#include "cuda/small/ring_store.cuh"
#include "natten_jax/added_logit.h"

namespace natten_jax::small {

/// Forward pass of a compute warp. RingReader::walk calls its functions.
template <class Element, int kHeadDim, int kForm, RingLoads kLoads, RingBiases kBiases>
struct RingForward {
  using Params = RingParamsOf<RingForwardParams, kBiases>;
  using Masks = RingMasks<kForm>;
  using Reader = RingReader<Element, kHeadDim, Params, Masks, kLoads>;
  static constexpr int kBlocks = Masks::kBlocks;
  static constexpr bool kHasRelativeBias = kBiases == RingBiases::kRelative;
  static constexpr bool kHasKeyBias = kBiases == RingBiases::kKey;
  static constexpr bool kHasReference = TrustedSums<Element>::kHasReference;
  static constexpr int kAtOnce = 2;  // number of blocks whose instructions are interleaved to hide latency

  const Params& p;
  Reader& reader;
  RowOperand<Element, kHeadDim> queries;
  float o[kHeadDim / 8][4];
  float sum[2], shift[2];
  float factor;
  LateSteps<kLoads> untrusted;
  RingRelativeBias<Params, kHasRelativeBias> bias;

  CUTE_DEVICE RingForward(const Params& p, Reader& reader)
      : p(p), reader(reader), factor(p.exponent_scale), bias(p, reader.shared) {}

  CUTE_DEVICE void enter(const RingUnit& unit) {
    if (p.scale.heads != nullptr) factor = p.scale.for_head(unit.batch * p.heads + unit.head).logits * kLog2E;
    bias.enter(unit, reader.masks);
  }

  CUTE_DEVICE void start(const RingUnit&, int step, int2 slabs) {
    bias.start(step, reader.along.first_key(slabs.x));
    queries = reader.load_tile();
    reader.release_tile(Reader::loaded(queries));
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) sum[r] = shift[r] = 0.f;
    CUTE_UNROLL
    for (int i = 0; i < kHeadDim / 2; ++i) o[i / 4][i % 4] = 0.f;
    if constexpr (kHasReference) find_reference(slabs);
  }

  /// Computes the reference logits for float16: each row's largest product with a block in the middle of the window.
  CUTE_DEVICE void find_reference(int2 slabs) {
    RingPosition middle = reader.position;
    const int before = (slabs.y - slabs.x) / 2;
    for (int i = 0; i < before; ++i) middle.advance(p.shape.slots);
    wait_for(reader.barriers.full[middle.slot], middle.parity);
    const std::uint32_t at[] = {reader.across + reader.slot_offset(middle.slot) + reader.block_offset(kBlocks / 2)};
    float products[1][2][4];
    reader.multiply_blocks(products, queries, at, {});
    const float (&x)[2][4] = products[0];
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      shift[r] = largest_of_row(fmaxf(fmaxf(x[0][2 * r], x[0][2 * r + 1]), fmaxf(x[1][2 * r], x[1][2 * r + 1])));
    }
  }

  /// Updates the tile's sums with the keys and values of a slab that the tile's queries see.
  CUTE_DEVICE void add(std::uint32_t slab, std::uint32_t hidden_of_slab) {
    auto biases = bias.slab_biases();
    add_blocks<0>(slab, hidden_of_slab, biases);
    bias.next_slab();
  }

  template <int kFirst, class Biases>
  CUTE_DEVICE void add_blocks(std::uint32_t slab, std::uint32_t hidden_of_slab, Biases& biases) {
    constexpr int kCount = kBlocks - kFirst < kAtOnce ? kBlocks - kFirst : kAtOnce;
    if constexpr (kCount > 0) {
      std::uint32_t at[kCount];
      CUTE_UNROLL
      for (int i = 0; i < kCount; ++i) at[i] = reader.across + slab + reader.block_offset(kFirst + i);
      float x[kCount][2][4];
      CUTE_UNROLL
      for (int i = 0; i < kCount; ++i) {
        biases.load(x[i]);
        biases.next_block();
        if ((kFirst + i + 1) % Masks::kInner == 0) biases.next_group(Masks::kInner);
        load_ring_key_biases<kHasKeyBias>(x[i], reader.statistics_of(slab, reader.block_offset(kFirst + i)));
      }
      reader.template multiply_blocks<kBiases != RingBiases::kNone>(x, queries, at, {});
      std::uint32_t weights[kCount][4];
      CUTE_UNROLL
      for (int b = 0; b < kCount; ++b) {
        const std::uint32_t hidden = reader.masks.inside[kFirst + b] | hidden_of_slab;
        CUTE_UNROLL
        for (int i = 0; i < 8; ++i) {
          float& logit = x[b][i / 4][i % 4];
          if constexpr (kHasReference) logit -= shift[i / 2 % 2];
          logit = fast_exp2(fmaf(logit, factor, additive_mask(masks_of_group(hidden, i / 4), i % 4)));
        }
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) {
          const float low = x[b][i / 2][i % 2 * 2], high = x[b][i / 2][i % 2 * 2 + 1];
          weights[b][i] = pack<Element>(low, high);
          sum[i % 2] += low + high;
        }
      }
      CUTE_UNROLL
      for (int i = 0; i < kCount; ++i) {
        reader.add_block(o, weights[i],
                         reader.along_rows + p.shape.array_bytes + slab + reader.block_offset(kFirst + i));
      }
      add_blocks<kFirst + kCount>(slab, hidden_of_slab, biases);
    }
  }

  /// Returns the sink of the unit's head as passed by the caller, or -infinity without sinks. Every tile loads the sink
  /// again, because the sums of a tile leave no register for it.
  CUTE_DEVICE float sink_of(const RingUnit& unit) const {
    return p.sinks == nullptr ? -INFINITY
                              : __ldcg(p.sinks + (p.are_sinks_shared ? 0 : unit.batch * p.heads) + unit.head);
  }

  /// Adds a sink to the sums of the lane's two rows, and writes the logsumexp of these rows. Four lanes share the two
  /// rows: the first lane writes the first row's logsumexp, and the second lane the second row's. Sets `row_factors` to
  /// the factors by which these rows' sums of weighted values have to be multiplied.
  CUTE_DEVICE void write_statistics(const RingUnit& unit, const int (&tokens)[2], float (&sums)[2],
                                    const float (&shifts)[2], float sink, float (&row_factors)[2]) const {
    // Add the sink as one more weight, if no digits are lost. Forward passes took 4% longer when sinks were always
    // merged with finished rows.
    const bool has_sink = sink != -INFINITY && !add_sink_to_sums(sums, shifts, sink, factor, tokens);
    const bool is_second = threadIdx.x % 2 != 0;
    const int token = is_second ? tokens[1] : tokens[0];
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) row_factors[r] = normalisation(sums[r]);
    Logsumexp logsumexp = logsumexp_of_sum(is_second ? sums[1] : sums[0], is_second ? shifts[1] : shifts[0], factor);
    if (has_sink) {
      const float share_of_keys = add_sink(logsumexp, added_logit(sink));
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) row_factors[r] *= __shfl_sync(0xffffffffu, share_of_keys, r, 4);
    }
    if (threadIdx.x % 4 >= 2 || token < 0) return;
    const std::int64_t at = (std::int64_t{unit.batch} * p.tokens + token) * p.heads + unit.head;
    p.logsumexp[at] = logsumexp.value;
    if (p.remainder != nullptr) p.remainder[at] = pack_remainder(logsumexp.remainder);
  }

  /// Writes a step's results if all of its sums are trusted, which means accurate enough (trusted_sums.cuh). Otherwise
  /// defers the step.
  CUTE_DEVICE void finish(const RingUnit& unit, int step) {
    const float sink = sink_of(unit);
    int tokens[2];
    reader.masks.find_tokens(p, step, tokens);
    float sums[2] = {sum_of_row(sum[0]), sum_of_row(sum[1])};
    bool is_trusted = true;
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      is_trusted &= (is_sum_trusted<Element>(sums[r], shift[r], factor) | static_cast<int>(tokens[r] < 0)) != 0;
    }
    if (__any_sync(0xffffffffu, !is_trusted)) {
      untrusted.add(step - unit.step);
      return;
    }
    float row_factors[2];
    write_statistics(unit, tokens, sums, shift, sink, row_factors);
    write_ring_rows_in_words<Element, kHeadDim>(p, p.out, unit, tokens, o[0], row_factors);
  }

  CUTE_DEVICE void finish_unit(const RingUnit& unit) {
    untrusted.for_each([&](int index) { finish_exactly(unit, unit.step + index); });
  }

  /// Recomputes a deferred step exactly, and writes its results.
  CUTE_DEVICE void finish_exactly(const RingUnit& unit, int step) {
    int tokens[2];
    reader.masks.enter_step(p, reader.along, step);
    reader.masks.find_tokens(p, step, tokens);
    float values[kHeadDim / 2], sums[2], largest[2];
    const RingTile<Element, kHeadDim> tile(p, unit, step);
    if constexpr (kHasRelativeBias) {
      compute_ring_exactly(values, sums, largest, p, tile, bias.step_biases(unit, step), factor);
    } else {
      compute_ring_exactly(values, sums, largest, p, tile, RingKeyBiasOfColumns<kHasKeyBias>(p, unit), factor);
    }
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) sums[r] = sum_of_row(sums[r]);
    float row_factors[2];
    write_statistics(unit, tokens, sums, largest, sink_of(unit), row_factors);
    write_ring_rows_in_words<Element, kHeadDim>(p, p.out, unit, tokens, values, row_factors);
  }
};

template <class Element, int kHeadDim, int kForm, RingLoads kLoads, RingBiases kBiases>
__global__ void __launch_bounds__(ring_threads(kLoads, kHeadDim), 1)
    natten_jax_small_ring_forward(const __grid_constant__ RingParamsOf<RingForwardParams, kBiases> p) {
  run_ring<kLoads, kHeadDim, RingForward<Element, kHeadDim, kForm, kLoads, kBiases>>(p);
}

}  // namespace natten_jax::small
