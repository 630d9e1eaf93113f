// Vectors of kLanes floats, composed of native vectors of the instruction set.
//
// This is kernel code: it is compiled once per instruction set, each time in a separate namespace.
#pragma once

#include <cstdint>

#include "cpu/plan.h"

#if defined(__clang__)
#define NATTEN_JAX_UNROLL _Pragma("clang loop unroll(full)")
#else
#define NATTEN_JAX_UNROLL _Pragma("GCC unroll 32")
#endif
#define NATTEN_JAX_INLINE inline __attribute__((always_inline))

namespace natten_jax::cpu::NATTEN_JAX_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
constexpr int kDotRows = 8;  // Rows whose sums dot_group keeps in registers.
constexpr int kSumColumns = 8;
#elif defined(__AVX__)
constexpr int kWidth = 8;
constexpr int kDotRows = 6;
constexpr int kSumColumns = 6;
#elif defined(__ARM_NEON)
// There are 32 vector registers, and the sums of a row or column need four. Groups of six rows or columns would spill
// with g++ 12. Compared with groups of five, groups of four would take 3% more instructions, and groups of two 20%
// more.
constexpr int kWidth = 4;
constexpr int kDotRows = 5;
constexpr int kSumColumns = 5;
#else
constexpr int kWidth = 4;
constexpr int kDotRows = 2;
constexpr int kSumColumns = 2;
#endif
constexpr int kVectors = kLanes / kWidth;
static_assert(kRowPadding >= kDotRows, "micro-kernels may touch whole groups of rows");

typedef float NativeFloat __attribute__((vector_size(4 * kWidth), may_alias));
typedef std::int32_t NativeInt __attribute__((vector_size(4 * kWidth), may_alias));
typedef std::uint32_t NativeBits __attribute__((vector_size(4 * kWidth), may_alias));

struct Float {
  NativeFloat v[kVectors];
};

/// Mask of lanes: all bits of a lane are set, or all are zero.
struct Mask {
  NativeInt v[kVectors];
};

NATTEN_JAX_INLINE Float load(const float* p) {
  Float x;
  NATTEN_JAX_UNROLL
  for (int i = 0; i < kVectors; ++i) x.v[i] = *reinterpret_cast<const NativeFloat*>(p + i * kWidth);
  return x;
}

NATTEN_JAX_INLINE void store(float* p, const Float& x) {
  NATTEN_JAX_UNROLL
  for (int i = 0; i < kVectors; ++i) *reinterpret_cast<NativeFloat*>(p + i * kWidth) = x.v[i];
}

NATTEN_JAX_INLINE Float broadcast(float value) {
  Float x;
  NATTEN_JAX_UNROLL
  for (int i = 0; i < kVectors; ++i) x.v[i] = value - NativeFloat{};
  return x;
}

#define NATTEN_JAX_LANEWISE(name, expression)                    \
  NATTEN_JAX_INLINE Float name(const Float& a, const Float& b) { \
    Float x;                                                     \
    NATTEN_JAX_UNROLL                                            \
    for (int i = 0; i < kVectors; ++i) x.v[i] = (expression);    \
    return x;                                                    \
  }
NATTEN_JAX_LANEWISE(operator+, a.v[i] + b.v[i])
NATTEN_JAX_LANEWISE(operator-, a.v[i] - b.v[i])
NATTEN_JAX_LANEWISE(operator*, a.v[i] * b.v[i])
/// NaN if `a` is NaN, because comparisons with NaN are false.
NATTEN_JAX_LANEWISE(maximum, a.v[i] < b.v[i] ? b.v[i] : a.v[i])
NATTEN_JAX_LANEWISE(minimum, b.v[i] < a.v[i] ? b.v[i] : a.v[i])
#undef NATTEN_JAX_LANEWISE

NATTEN_JAX_INLINE Float select(const Mask& mask, const Float& yes, const Float& no) {
  Float x;
  NATTEN_JAX_UNROLL
  for (int i = 0; i < kVectors; ++i) x.v[i] = mask.v[i] ? yes.v[i] : no.v[i];
  return x;
}

NATTEN_JAX_INLINE Mask operator&(const Mask& a, const Mask& b) {
  Mask x;
  NATTEN_JAX_UNROLL
  for (int i = 0; i < kVectors; ++i) x.v[i] = a.v[i] & b.v[i];
  return x;
}

NATTEN_JAX_INLINE Mask equal(const Float& a, float b) {
  Mask x;
  NATTEN_JAX_UNROLL
  for (int i = 0; i < kVectors; ++i) x.v[i] = a.v[i] == b;
  return x;
}

NATTEN_JAX_INLINE Mask operator|(const Mask& a, const Mask& b) {
  Mask x;
  NATTEN_JAX_UNROLL
  for (int i = 0; i < kVectors; ++i) x.v[i] = a.v[i] | b.v[i];
  return x;
}

/// Keeps the compiler from fusing a product with a later addition. If it fused them in one pass but not in another, the
/// passes would compute different logits.
NATTEN_JAX_INLINE Float rounded(Float x) {
  NATTEN_JAX_UNROLL
  for (int i = 0; i < kVectors; ++i) {
#if defined(__x86_64__)
    asm("" : "+x"(x.v[i]));
#elif defined(__ARM_NEON)
    asm("" : "+w"(x.v[i]));
#else
    asm("" : "+m"(x.v[i]));
#endif
  }
  return x;
}

/// Mask of the lanes whose range [first, last) contains `index`.
NATTEN_JAX_INLINE Mask holds(const std::int32_t* first, const std::int32_t* last, std::int32_t index) {
  Mask x;
  NATTEN_JAX_UNROLL
  for (int i = 0; i < kVectors; ++i) {
    const NativeInt low = *reinterpret_cast<const NativeInt*>(first + i * kWidth);
    const NativeInt high = *reinterpret_cast<const NativeInt*>(last + i * kWidth);
    x.v[i] = (low <= index) & (high > index);
  }
  return x;
}

/// 2^x to about 1 ulp, for x <= 127. Zero if 2^x is below the normal range or x is -inf; NaN if x is NaN.
NATTEN_JAX_INLINE Float exp2(const Float& x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23. Adding it rounds x to an integer, in the low mantissa bits.
  Float y;
  NATTEN_JAX_UNROLL
  for (int i = 0; i < kVectors; ++i) {
    const NativeFloat shifted = x.v[i] + kRound;
    const NativeFloat f = x.v[i] - (shifted - kRound);
    NativeFloat p = 0.00015353361959569156f * f + 0.0013398873852565885f;
    p = p * f + 0.00961843691766262f;
    p = p * f + 0.055503323674201965f;
    p = p * f + 0.24022647738456726f;
    p = p * f + 0.6931471824645996f;
    p = p * f + 1.0f;
    // If 2^x is below the normal range, the exponent bits overflow. The next line then replaces the result by zero.
    const NativeBits scaled = reinterpret_cast<NativeBits>(p) + (reinterpret_cast<NativeBits>(shifted) << 23);
    y.v[i] = x.v[i] < -126.0f ? NativeFloat{} : reinterpret_cast<NativeFloat>(scaled);
  }
  return y;
}

}  // namespace
}  // namespace natten_jax::cpu::NATTEN_JAX_ISA
