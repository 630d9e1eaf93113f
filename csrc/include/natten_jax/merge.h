// Merges softmaxes over several sets of keys: two logsumexps and their remainders (natten_jax/logsumexp.h) become the
// logsumexp of both sets. A sink is a separate set: a logit of a query head without a key.
#pragma once

#include <cmath>

#include "natten_jax/added_logit.h"
#include "natten_jax/logsumexp.h"
#include "natten_jax/problem.h"

namespace natten_jax {

/// A row's logsumexp, and the digits that do not fit into its float32.
struct Logsumexp {
  float value, remainder;
};

/// Shares of two sets of keys in the softmax over both.
struct Shares {
  float own, other;
};

/// Merges the logsumexp of other keys into `own`.
///
/// Args:
///   others: the other logsumexp.
///   other_parts: its remainder.
NATTEN_JAX_HOST_DEVICE inline Shares merge_logsumexps(Logsumexp& own, float others, const RemainderParts& other_parts) {
  const float of_own = base2_logsumexp(own.value), of_others = base2_logsumexp(others);
  const RemainderParts own_parts = unpack_remainder(own.remainder);
  const float highest = fmaxf(of_own, of_others), reference = highest == -INFINITY ? 0.f : highest;
  const float own_distance = (of_own - reference) + own_parts.distance,
              other_distance = (of_others - reference) + other_parts.distance;
  // Remainders of large logits exceed 1. Weights are relative to the remainders as well, so that nothing overflows.
  const float larger = fmaxf(own_distance, other_distance), top = larger == -INFINITY ? 0.f : larger;
  const float own_weight = exp2f((own_distance - top) + own_parts.log2_sum),
              other_weight = exp2f((other_distance - top) + other_parts.log2_sum);
  const float total = own_weight + other_weight, log2_total = log2f(total);
  if (total == 0.f) return {0.f, 0.f};
  own.value = (reference + (top + log2_total)) * kLn2;
  own.remainder = pack_remainder((reference - base2_logsumexp(own.value)) + top, log2_total);
  return {own_weight / total, other_weight / total};
}

NATTEN_JAX_HOST_DEVICE inline Shares merge_logsumexps(Logsumexp& own, const Logsumexp& others) {
  return merge_logsumexps(own, others.value, unpack_remainder(others.remainder));
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
  const float distance = packed_distance(rounding);
  if (row.value == -INFINITY) {
    row = {sink, distance};  // a merge would round it
    return sink - sink;      // zero or NaN
  }
  return merge_logsumexps(row, sink, {distance, 0.f}).own;
}

}  // namespace natten_jax
