// Element types in memory, and conversions to and from float. The conversions consist of bit operations and additions,
// which compilers vectorize.
//
// This is kernel code: it is compiled once per instruction set, each time in a separate namespace.
#pragma once

#include <cstdint>

#include "cpu/vector.h"

namespace natten_jax::cpu::NATTEN_JAX_ISA {
namespace {

struct Half {
  std::uint16_t bits;
};

struct BFloat16 {
  std::uint16_t bits;
};

template <typename To, typename From>
NATTEN_JAX_INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof(to));
  return to;
}

NATTEN_JAX_INLINE float to_float(float x) {
  return x;
}

NATTEN_JAX_INLINE float to_float(BFloat16 x) {
  return bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16);
}

NATTEN_JAX_INLINE float to_float(Half x) {
  const std::uint32_t sign = static_cast<std::uint32_t>(x.bits & 0x8000u) << 16;
  const std::uint32_t magnitude = static_cast<std::uint32_t>(x.bits & 0x7fffu) << 13;
  const std::uint32_t normal = magnitude + (112u << 23);
  // A denormal half has exponent -14 and no implicit leading one. A float with this exponent and mantissa has an
  // implicit leading one, so subtract it.
  const float denormal = bit_cast<float>(magnitude + (113u << 23)) - bit_cast<float>(113u << 23);
  const std::uint32_t finite = magnitude < (1u << 23) ? bit_cast<std::uint32_t>(denormal) : normal;
  return bit_cast<float>(sign | (magnitude >= (31u << 23) ? magnitude + (224u << 23) : finite));
}

NATTEN_JAX_INLINE void from_float(float x, float& to) {
  to = x;
}

NATTEN_JAX_INLINE void from_float(float x, BFloat16& to) {
  const std::uint32_t bits = bit_cast<std::uint32_t>(x);
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  to.bits = static_cast<std::uint16_t>(is_nan ? (bits >> 16) | 0x40u : rounded);
}

NATTEN_JAX_INLINE void from_float(float x, Half& to) {
  const std::uint32_t bits = bit_cast<std::uint32_t>(x);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  const std::uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // Adding 0.5 rounds the number to nearest even in units of 2^-24, the spacing of denormal halves. The low bits of the
  // sum count these units.
  const std::uint32_t denormal = bit_cast<std::uint32_t>(bit_cast<float>(magnitude) + 0.5f) - (126u << 23);
  const std::uint32_t finite = magnitude < (113u << 23) ? denormal : normal;
  const std::uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  to.bits = static_cast<std::uint16_t>((bits >> 16 & 0x8000u) | (magnitude >= (143u << 23) ? special : finite));
}

/// Converts `count` elements to floats.
template <typename T>
NATTEN_JAX_INLINE void widen(const T* from, float* to, std::int64_t count) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) to[i] = to_float(from[i]);
}

/// Converts `count` floats to elements, rounding to nearest even.
template <typename T>
NATTEN_JAX_INLINE void narrow(const float* from, T* to, std::int64_t count) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) from_float(from[i], to[i]);
}

}  // namespace
}  // namespace natten_jax::cpu::NATTEN_JAX_ISA
