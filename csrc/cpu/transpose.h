// Transposes rows of the owner side into vector lanes, and back.
//
// This is kernel code: it is compiled once per instruction set, each time in a separate namespace.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cpu/element.h"
#include "cpu/lane_block.h"
#include "cpu/vector.h"

namespace natten_jax::cpu::NATTEN_JAX_ISA {
namespace {

/// Four floats; every instruction set in use shuffles these fast.
typedef float Quad __attribute__((vector_size(16), aligned(4), may_alias));

NATTEN_JAX_INLINE Quad load_quad(const float* p) {
  return *reinterpret_cast<const Quad*>(p);
}
NATTEN_JAX_INLINE void store_quad(float* p, Quad x) {
  *reinterpret_cast<Quad*>(p) = x;
}

/// Elements `kFrom` of two vectors. Indices 0 to 3 refer to `x`, and indices 4 to 7 to `y`.
template <int... kFrom>
NATTEN_JAX_INLINE Quad shuffled(Quad x, Quad y) {
#if defined(__clang__)
  return __builtin_shufflevector(x, y, kFrom...);
#else
  // GCC before version 12 has no __builtin_shufflevector.
  typedef std::int32_t Indices __attribute__((vector_size(16)));
  return __builtin_shuffle(x, y, Indices{kFrom...});
#endif
}

NATTEN_JAX_INLINE void transpose(Quad (&x)[4]) {
  const Quad a = shuffled<0, 4, 1, 5>(x[0], x[1]);
  const Quad b = shuffled<2, 6, 3, 7>(x[0], x[1]);
  const Quad c = shuffled<0, 4, 1, 5>(x[2], x[3]);
  const Quad d = shuffled<2, 6, 3, 7>(x[2], x[3]);
  x[0] = shuffled<0, 1, 4, 5>(a, c);
  x[1] = shuffled<2, 3, 6, 7>(a, c);
  x[2] = shuffled<0, 1, 4, 5>(b, d);
  x[3] = shuffled<2, 3, 6, 7>(b, d);
}

/// Sets lanes[d][lane] to `factor` times element d of the lane's row.
///
/// Args:
///   block: the lane block; it contains the row number of each lane.
///   array: array of the owner side.
///   width: elements per row.
///   factor: factor of every element.
///   lines: scratch memory for kLanes rows of floats.
///   lanes: the result.
template <typename T>
NATTEN_JAX_INLINE void load_lanes(const LaneBlock& block, const T* array, std::int64_t width, float factor,
                                  float* lines, float* lanes) {
  const float* rows[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) {
    const T* row = array + block.row[lane] * width;
    if constexpr (std::is_same_v<T, float>) {
      rows[lane] = row;
    } else {
      widen(row, lines + lane * width, width);
      rows[lane] = lines + lane * width;
    }
  }
  const std::int64_t quads = width / 4 * 4;
  for (int lane = 0; lane < kLanes; lane += 4) {
    for (std::int64_t d = 0; d < quads; d += 4) {
      Quad x[4];
      NATTEN_JAX_UNROLL
      for (int i = 0; i < 4; ++i) x[i] = load_quad(rows[lane + i] + d);
      transpose(x);
      NATTEN_JAX_UNROLL
      for (int i = 0; i < 4; ++i) store_quad(lanes + (d + i) * kLanes + lane, x[i] * factor);
    }
  }
  for (std::int64_t d = quads; d < width; ++d) {
    for (int lane = 0; lane < kLanes; ++lane) lanes[d * kLanes + lane] = rows[lane][d] * factor;
  }
}

/// Sets element d of each active lane's row to factor[lane] * lanes[d][lane].
template <typename T>
NATTEN_JAX_INLINE void store_lanes(const LaneBlock& block, const float* lanes, std::int64_t width, const float* factor,
                                   float* lines, T* array) {
  const std::int64_t quads = width / 4 * 4;
  for (int lane = 0; lane < kLanes; lane += 4) {
    const Quad factors = load_quad(factor + lane);
    for (std::int64_t d = 0; d < quads; d += 4) {
      Quad x[4];
      NATTEN_JAX_UNROLL
      for (int i = 0; i < 4; ++i) x[i] = load_quad(lanes + (d + i) * kLanes + lane) * factors;
      transpose(x);
      NATTEN_JAX_UNROLL
      for (int i = 0; i < 4; ++i) store_quad(lines + (lane + i) * width + d, x[i]);
    }
  }
  for (std::int64_t d = quads; d < width; ++d) {
    for (int lane = 0; lane < kLanes; ++lane) lines[lane * width + d] = lanes[d * kLanes + lane] * factor[lane];
  }
  for (int lane = 0; lane < block.active; ++lane) {
    narrow(lines + lane * width, array + block.row[lane] * width, width);
  }
}

}  // namespace
}  // namespace natten_jax::cpu::NATTEN_JAX_ISA
