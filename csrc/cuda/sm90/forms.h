// Forms in which the Hopper kernels are compiled, and their limits. Only plain numbers: the launch code selects a form
// from them, the kernels are instantiated from them, and Python reads them in every build.
#pragma once

#include <cstdint>

namespace natten_jax::sm90 {

/// Head dimensions must be multiples of this, because TMA requires row strides that are multiples of 16 bytes.
inline constexpr std::int64_t kHeadDimStep = 8;
inline constexpr std::int64_t kFloat8HeadDimStep = 16;
inline constexpr std::int64_t kLargestHeadDim = 256;

/// Bytes of shared memory per CTA.
inline constexpr int kSharedMemory = 227 << 10;

/// The widest heads for which shared memory holds an output tile next to a query tile. Only forward launches with
/// heads of at most this width can continue earlier launches, whose output they load into that tile.
inline constexpr std::int64_t kLargestContinuedHeadDim = 128;

/// Minimum number of tiles per CTA for dynamic scheduling. With fewer tiles, clearing the counter first costs more than
/// it saves.
inline constexpr std::int64_t kTilesWorthCounting = 4;

/// A form of a kernel: its maximum head dimension and the maximum number of tokens of its tiles.
struct Form {
  int head_dim;
  int queries;
  int keys;
};

/// Elements of a head per k-step of a wgmma with 16-bit operands.
inline constexpr int kStep = 16;

/// True if products over a head take fewer k-steps than the form has. Narrow heads have separate kernels: checking for
/// the end of the head would make forward passes with heads of 128 from 2 to 7% slower (H100).
constexpr bool is_narrow(std::int64_t head_dim, int form_head_dim) {
  return head_dim <= form_head_dim - kStep;
}

/// Sorted by head dimension, then by tile size. A warpgroup computes 64 queries.
inline constexpr Form kForwardForms[] = {
    {64, 128, 128}, {64, 192, 128}, {128, 128, 96}, {128, 128, 128}, {192, 128, 96}, {256, 128, 64},
};
inline constexpr Form kFloat8ForwardForms[] = {{64, 128, 128}, {128, 128, 128}, {256, 128, 64}};
inline constexpr Form kBackwardForms[] = {{64, 64, 128}, {128, 64, 128}, {256, 64, 64}};

}  // namespace natten_jax::sm90
