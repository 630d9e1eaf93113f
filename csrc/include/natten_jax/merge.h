// Merges softmaxes over two sets of keys. Given the logsumexp and the remainder (natten_jax/logsumexp.h) of each set,
// computes the logsumexp and the remainder of all keys. A sink, which is a logit of a query head without a key, counts
// as a separate set.
#pragma once

#include <cmath>

#include "natten_jax/added_logit.h"
#include "natten_jax/logsumexp.h"
#include "natten_jax/problem.h"

namespace natten_jax {

/// Shares of two sets of keys in the softmax over both sets.
struct Shares {
  float own, other;
};

/// Merges the logsumexp of other keys into `own`. Large values of Remainder::distance are rounded as in packed
/// remainders, so that a key and a sink with equal logits have equal weights.
NATTEN_JAX_HOST_DEVICE inline Shares merge_logsumexps(Logsumexp& own, const Logsumexp& others) {
  const float own_base2 = base2_logsumexp(own.value), other_base2 = base2_logsumexp(others.value);
  const float highest = fmaxf(own_base2, other_base2), reference = highest == -INFINITY ? 0.f : highest;
  const float own_distance = (own_base2 - reference) + packed_distance(own.remainder.distance),
              other_distance = (other_base2 - reference) + packed_distance(others.remainder.distance);
  // Distances of large logits may be too large for exp2, so subtract the larger distance from both.
  const float larger = fmaxf(own_distance, other_distance), top = larger == -INFINITY ? 0.f : larger;
  const float own_weight = exp2f((own_distance - top) + own.remainder.log2_sum),
              other_weight = exp2f((other_distance - top) + others.remainder.log2_sum);
  const float total = own_weight + other_weight, log2_total = log2f(total);
  if (total == 0.f) return {0.f, 0.f};
  own.value = (reference + (top + log2_total)) * kLn2;
  own.remainder = {(reference - base2_logsumexp(own.value)) + top, log2_total};
  return {own_weight / total, other_weight / total};
}

/// Returns the logit of a head's sink, or -infinity if the call has no sinks. In forward passes of such calls,
/// HeadScale::query_gradient holds the sink.
NATTEN_JAX_HOST_DEVICE inline float sink_of(const Scale& scale, const HeadScale& head) {
  return scale.heads == nullptr ? -INFINITY : added_logit(head.query_gradient);
}

/// Adds a sink to a row's logsumexp. Returns the share of the row's keys in the softmax over its keys and the sink.
NATTEN_JAX_HOST_DEVICE inline float add_sink(Logsumexp& row, float sink) {
  if (sink == -INFINITY) return 1.f;
#if defined(__CUDA_ARCH__)
  const float rounding = __builtin_fmaf(sink, kLog2E, -base2_logsumexp(sink));
#else
  const float rounding = 0.f;  // host kernels also round key biases after their conversion to base 2
#endif
  const Logsumexp sink_row{sink, {rounding, 0.f}};
  if (row.value == -INFINITY) {
    row = sink_row;      // assigned directly, because merge_logsumexps would round the sink
    return sink - sink;  // zero, or NaN for a sink of NaN
  }
  return merge_logsumexps(row, sink_row).own;
}

}  // namespace natten_jax
