// Biases of keys as the matrix units add them to logits in the forward kernel: operands of one more step of the product
// of queries and keys.
#pragma once

#include <cutlass/bfloat16.h>

#include <cmath>
#include <cstdint>
#include <cute/config.hpp>

namespace natten_jax::sm90 {

/// Numbers of 8 binary digits, whatever the element type: a bias is the sum of three, which ones are multiplied with.
/// Where the threads of the forward kernel read biases as the numbers that products begin with, 16 loads of 16 bytes
/// for 128 keys, it took 1.12 to 1.31 times as long as without.
using BiasPart = cutlass::bfloat16_t;
constexpr int kBiasParts = 3;

/// The parts of a bias: halves of words, the largest one first, and a zero.
CUTE_DEVICE uint2 parts_of_bias(float bias) {
  constexpr std::uint32_t kDigits = 0xffff0000u;
  const std::uint32_t high = __float_as_uint(bias) & kDigits;
  const float rest = bias == -INFINITY ? 0.f : bias - __uint_as_float(high);
  const std::uint32_t middle = __float_as_uint(rest) & kDigits,
                      low = __float_as_uint(rest - __uint_as_float(middle)) & kDigits;
  return make_uint2(high >> 16 | middle, low >> 16);
}

}  // namespace natten_jax::sm90
