// Window arithmetic of neighborhood attention: which keys a query sees, and which queries see a key.
//
// The mask is separable, so everything here is about one dimension. Tokens whose coordinates are equal modulo the
// dilation form a dilation group; within its group a token has an index, and windows are contiguous ranges of indices.
// natten_jax/windows.py is the same arithmetic for Python; the tests compare the two.
//
// If a dimension wraps, ranges lie on an unbounded line on which the group repeats. No range is longer than the group.
#pragma once

#include <cstdint>

// The library contains the host code several times, compiled for different instruction sets. Without forced inlining,
// the linker could keep only a function's copy for a newer processor, which an older processor cannot execute.
#if defined(__CUDACC__)
#define NATTEN_JAX_HOST_DEVICE __host__ __device__
#else
#define NATTEN_JAX_HOST_DEVICE __attribute__((always_inline))
#endif

namespace natten_jax {

/// A half-open range of indices.
template <typename Int>
struct Range {
  Int begin;
  Int end;

  NATTEN_JAX_HOST_DEVICE constexpr Int size() const { return end > begin ? end - begin : 0; }
  NATTEN_JAX_HOST_DEVICE constexpr bool empty() const { return end <= begin; }
};

template <typename Int>
NATTEN_JAX_HOST_DEVICE constexpr Int smaller(Int a, Int b) {
  return b < a ? b : a;
}

template <typename Int>
NATTEN_JAX_HOST_DEVICE constexpr Int larger(Int a, Int b) {
  return a < b ? b : a;
}

/// The indices that lie in both ranges.
template <typename Int>
NATTEN_JAX_HOST_DEVICE constexpr Range<Int> intersection(Range<Int> a, Range<Int> b) {
  return {larger(a.begin, b.begin), smaller(a.end, b.end)};
}

/// Boundary mode of windows.
///
/// - kShift: windows are shifted to stay inside of the dimension.
/// - kCausal: windows end at the query.
/// - kCut: windows are cut at the ends of the dimension.
/// - kWrap: windows wrap around to the other end of the dimension.
enum class Ends : int { kShift = 0, kCausal = 1, kCut = 2, kWrap = 3 };

/// Windows along one dimension. Kernels use a separate type, which has the same members but replaces divisions by
/// multiplications.
struct Window {
  std::int64_t kernel_size;
  std::int64_t stride;
  std::int64_t dilation;
  Ends ends;

  NATTEN_JAX_HOST_DEVICE constexpr bool is_causal() const { return ends == Ends::kCausal; }

  /// First query of the stride group of the query at `index`. The group's queries share a window.
  NATTEN_JAX_HOST_DEVICE constexpr std::int64_t stride_group(std::int64_t index) const {
    return index / stride * stride;
  }

  /// Dilation steps in an extent, rounded down.
  NATTEN_JAX_HOST_DEVICE constexpr std::int64_t dilations(std::int64_t extent) const { return extent / dilation; }
};

/// Number of tokens in dilation group `group` of a dimension of `extent` tokens. It is also the number of the group's
/// tokens before coordinate `extent`. The formula does not add the dilation to the extent, because the sum may not fit
/// into 32 bits.
template <class Windows, typename Int>
NATTEN_JAX_HOST_DEVICE constexpr Int group_length(const Windows& windows, Int extent, Int group) {
  return group < extent ? windows.dilations(extent - 1 - group) + 1 : 0;
}

/// Range of the key indices that the query at `index` sees.
///
/// `index` may exceed `length` only if the window is the whole key sequence (`kernel_size == length`), as in attention
/// between sequences of different lengths.
///
/// Args:
///   windows: a Window, or a type with its members.
///   index: query index inside its dilation group.
///   length: keys in the dilation group; at least `kernel_size`.
template <class Windows, typename Int>
NATTEN_JAX_HOST_DEVICE constexpr Range<Int> window_bounds(const Windows& windows, Int index, Int length) {
  const Int group_start = windows.stride_group(index);
  if (windows.ends == Ends::kCausal) {
    const Int leader = smaller<Int>(group_start + windows.stride - 1, length - 1);
    return {larger<Int>(leader - windows.kernel_size + 1, 0), smaller<Int>(index + 1, length)};
  }
  const Int leader = smaller<Int>(group_start + windows.stride / 2, length - 1);
  const Int first = leader - windows.kernel_size / 2;
  if (windows.ends == Ends::kWrap) return {first, first + windows.kernel_size};
  if (windows.ends == Ends::kCut) return {larger<Int>(first, 0), smaller<Int>(first + windows.kernel_size, length)};
  const Int start = smaller<Int>(larger<Int>(first, 0), length - windows.kernel_size);
  return {start, start + windows.kernel_size};
}

/// First query whose leader is at `index` or after it. The leader of a query is the token in the middle of the query's
/// stride group; it determines the window. Only for windows that are cut or wrap.
template <class Windows, typename Int>
NATTEN_JAX_HOST_DEVICE constexpr Int first_query_with_leader(const Windows& windows, Int index, Int length) {
  Int round = 0;
  if (windows.ends == Ends::kWrap) {
    // Stride groups restart in each repetition of the layout, so find the repetition of `index`. The loops take few
    // iterations.
    while (index - round < 0) round -= length;
    while (index - round >= length) round += length;
  }
  const Int position = larger<Int>(index - round, 0);
  if (position >= length) return round + length;
  // A leader lies `stride / 2` after the first query of its group, so adding `offset` rounds up to the first group
  // whose leader is at `position` or after it. If `position` is after the last leader, the result is the end of the
  // repetition.
  const Int offset = windows.stride - windows.stride / 2 - 1;
  return round + smaller<Int>(windows.stride_group(position + offset), length);
}

/// Range of the query indices that see the key at `index`: all queries in the range see the key, and no others. If the
/// dimension wraps, `index` may lie in a repetition of the layout.
///
/// Args:
///   windows: a Window, or a type with its members.
///   index: key index inside its dilation group.
///   query_length: queries in the dilation group. It differs from `key_length` only if `kernel_size == key_length`.
///   key_length: keys in the dilation group.
template <class Windows, typename Int>
NATTEN_JAX_HOST_DEVICE constexpr Range<Int> inverse_window_bounds(const Windows& windows, Int index, Int query_length,
                                                                  Int key_length) {
  if (windows.ends == Ends::kCut || windows.ends == Ends::kWrap) {
    const Int left = windows.kernel_size / 2;
    const Int right = windows.kernel_size - 1 - left;
    return {first_query_with_leader<Windows, Int>(windows, index - right, key_length),
            first_query_with_leader<Windows, Int>(windows, index + left + 1, key_length)};
  }
  const bool is_in_last_window = index >= key_length - windows.kernel_size;
  Int first = 0;
  Int last = query_length;
  if (windows.ends == Ends::kCausal) {
    first = index;
    if (!is_in_last_window) last = windows.stride_group(index + windows.kernel_size);
  } else {
    const Int left = windows.kernel_size / 2;
    const Int right = windows.kernel_size - 1 - left;
    // The first stride group that sees the key is the first group whose leader is at `index - right` or after it. The
    // leader of group `n` is `n * stride + stride / 2`, so adding `offset` rounds up to this group.
    const Int offset = windows.stride - windows.stride / 2 - 1;
    if (index >= windows.kernel_size) first = windows.stride_group(index - right + offset);
    if (!is_in_last_window) last = windows.stride_group(index + left + offset + 1);
  }
  last = smaller<Int>(last, query_length);
  return {smaller<Int>(first, last), last};
}

}  // namespace natten_jax
