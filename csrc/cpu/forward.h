// The forward pass: online softmax over the keys that the queries of an item attend to.
//
// This is kernel code: it is compiled once per instruction set, each time in a separate namespace.
#pragma once

#include "cpu/head_scales.h"
#include "cpu/key_value_stream.h"
#include "cpu/microkernels.h"
#include "cpu/transpose.h"
#include "natten_jax/logsumexp.h"
#include "natten_jax/merge.h"

namespace natten_jax::cpu::NATTEN_JAX_ISA {
namespace {

constexpr float kInfinity = __builtin_inff();

/// Running softmax statistics of the lanes of a block: maximum logit (in base 2) and sum of exponentials.
struct Softmax {
  float* maximum;
  float* sum;
};

/// Replaces logits by exponentials relative to the new running maximum.
///
/// Returns:
///   Factor per lane that rescales the lane's earlier sums to the new maximum.
NATTEN_JAX_INLINE Float exponentiate(const LaneBlock& block, const Box& box, bool is_masked, std::int64_t rows,
                                     const Softmax& state, float* logits) {
  const Float before = load(state.maximum);
  Float maximum_ = before;
  if (is_masked) {
    const Float hidden = broadcast(-kInfinity);
    for_each_masked_row(block, box, [&](std::int64_t row, const Mask& mask) {
      const Float logit = select(mask, load(logits + row * kLanes), hidden);
      store(logits + row * kLanes, logit);
      maximum_ = maximum(logit, maximum_);
    });
  } else {
    for (std::int64_t row = 0; row < rows; ++row) maximum_ = maximum(load(logits + row * kLanes), maximum_);
  }
  // If a lane has had only masked keys so far, its maximum is -infinity. A finite reference makes its exponentials zero
  // instead of NaN.
  const Float reference = select(equal(maximum_, -kInfinity), broadcast(0.0f), maximum_);
  Float sum = broadcast(0.0f);
  for (std::int64_t row = 0; row < rows; ++row) {
    const Float e = exp2(load(logits + row * kLanes) - reference);
    store(logits + row * kLanes, e);
    sum = sum + e;
  }
  const Float keep = exp2(before - reference);
  store(state.maximum, maximum_);
  store(state.sum, load(state.sum) * keep + sum);
  return keep;
}

template <typename T>
void forward(const Plan& plan, const Item& item, std::byte* scratch) {
  const Problem& p = plan.problem;
  const Workspace w = plan.workspace(scratch);
  const std::int64_t blocks = make_lane_blocks(plan, item, w.blocks);
  const auto softmax = [&w](std::int64_t i) {
    return Softmax{w.statistics + i * kStatistics * kLanes, w.statistics + (i * kStatistics + 1) * kLanes};
  };
  const auto exponent_scales = [&w](std::int64_t i) { return w.statistics + (i * kStatistics + 2) * kLanes; };
  for (std::int64_t i = 0; i < blocks; ++i) {
    write_exponent_scales(p, item, w.blocks[i], exponent_scales(i));
    load_lanes(w.blocks[i], static_cast<const T*>(plan.arrays.query), p.head_dim, 1.0f, w.lines,
               w.lanes_a + i * p.head_dim * kLanes);
    store(softmax(i).maximum, broadcast(-kInfinity));
    store(softmax(i).sum, broadcast(0.0f));
    clear(w.sums_b + i * p.head_dim_v * kLanes, p.head_dim_v * kLanes);
  }

  stream_keys_and_values<T>(plan, item, blocks, w, exponent_scales,
                            [&](std::int64_t i, const Box& box, bool is_masked, std::int64_t rows, bool) {
                              const Float keep = exponentiate(w.blocks[i], box, is_masked, rows, softmax(i), w.logits);
                              accumulate<true>(w.logits, w.rows_b, rows, p.head_dim_v, keep,
                                               w.sums_b + i * p.head_dim_v * kLanes);
                            });

  for (std::int64_t i = 0; i < blocks; ++i) {
    const LaneBlock& block = w.blocks[i];
    alignas(64) float inverse[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) {
      // If the query attends to no key, the sum is zero. The output is then zero, and the logsumexp -inf.
      const float sum = softmax(i).sum[lane];
      inverse[lane] = sum == 0.0f ? 0.0f : 1.0f / sum;
    }
    for (int lane = 0; lane < block.active; ++lane) {
      const float shift = softmax(i).maximum[lane], sum = softmax(i).sum[lane], log2_sum = __builtin_log2f(sum);
      Logsumexp logsumexp{shift * kLn2 + log2_sum * kLn2, {}};
      if (sum != 0.0f) logsumexp.remainder = logsumexp_remainder(logsumexp.value, shift, log2_sum);
      const float sink = sink_of(p.scale, scale_of_lane(p, item, block, lane));
      if (sink != -kInfinity) inverse[lane] *= add_sink(logsumexp, sink);
      plan.arrays.logsumexp[block.row[lane]] = logsumexp.value;
      if (plan.arrays.remainder != nullptr) {
        plan.arrays.remainder[block.row[lane]] = pack_remainder(logsumexp.remainder);
      }
    }
    store_lanes(block, w.sums_b + i * p.head_dim_v * kLanes, p.head_dim_v, inverse, w.lines,
                static_cast<T*>(plan.arrays.out));
  }
}

}  // namespace
}  // namespace natten_jax::cpu::NATTEN_JAX_ISA
