// Merges softmaxes over several sets of keys: two logsumexps and their remainders (natten_jax/logsumexp.h) become the
// logsumexp of both sets. A sink is a separate set: a logit of a query head without a key.
#pragma once

#include <cmath>

#include "natten_jax/added_logit.h"
#include "natten_jax/logsumexp.h"
#include "natten_jax/problem.h"

namespace natten_jax {

/// Shares of two sets of keys in the softmax over both.
struct Shares {
  float own, other;
};

/// Merges the logsumexp of other keys into `own`. Large distances are rounded as arrays store them, so that a key and a
/// sink with equal logits have equal weights.
NATTEN_JAX_HOST_DEVICE inline Shares merge_logsumexps(Logsumexp& own, const Logsumexp& others) {
  const float own_base2 = base2_logsumexp(own.value), other_base2 = base2_logsumexp(others.value);
  const float highest = fmaxf(own_base2, other_base2), reference = highest == -INFINITY ? 0.f : highest;
  const float own_distance = (own_base2 - reference) + packed_distance(own.remainder.distance),
              other_distance = (other_base2 - reference) + packed_distance(others.remainder.distance);
  // Remainders of large logits exceed 1. Weights are relative to the remainders as well, so that nothing overflows.
  const float larger = fmaxf(own_distance, other_distance), top = larger == -INFINITY ? 0.f : larger;
  const float own_weight = exp2f((own_distance - top) + own.remainder.log2_sum),
              other_weight = exp2f((other_distance - top) + others.remainder.log2_sum);
  const float total = own_weight + other_weight, log2_total = log2f(total);
  if (total == 0.f) return {0.f, 0.f};
  own.value = (reference + (top + log2_total)) * kLn2;
  own.remainder = {(reference - base2_logsumexp(own.value)) + top, log2_total};
  return {own_weight / total, other_weight / total};
}

/// The logit of a head's sink, or -infinity if the call has no sinks. Forward passes keep it in the field that backward
/// passes use for the factor of query gradients.
NATTEN_JAX_HOST_DEVICE inline float sink_of(const Scale& scale, const HeadScale& head) {
  return scale.heads == nullptr ? -INFINITY : added_logit(head.query_gradient);
}

/// Adds a sink to a row's logsumexp. Returns the share of the row's keys.
NATTEN_JAX_HOST_DEVICE inline float add_sink(Logsumexp& row, float sink) {
  if (sink == -INFINITY) return 1.f;
#if defined(__CUDA_ARCH__)
  const float rounding = __builtin_fmaf(sink, kLog2E, -base2_logsumexp(sink));
#else
  const float rounding = 0.f;  // host kernels also round key biases to base 2
#endif
  const Logsumexp of_sink{sink, {rounding, 0.f}};
  if (row.value == -INFINITY) {
    row = of_sink;       // a merge would round it
    return sink - sink;  // zero or NaN
  }
  return merge_logsumexps(row, of_sink).own;
}

}  // namespace natten_jax
