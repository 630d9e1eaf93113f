// Forms (compiled variants) of the Hopper kernels, and limits of the kernels. This file contains only constants, so
// that builds without CUDA can include it. The kernels are instantiated from these constants, and the launch code
// chooses a form from them. The Python module also exports some of them.
#pragma once

#include <cstdint>

namespace natten_jax::sm90 {

/// Head dimensions must be multiples of these numbers, because TMA requires row strides that are multiples of 16 bytes.
inline constexpr std::int64_t kHeadDimStep = 8;
inline constexpr std::int64_t kFloat8HeadDimStep = 16;
inline constexpr std::int64_t kLargestHeadDim = 256;

/// Maximum shared memory of a CTA, in bytes.
inline constexpr int kSharedMemory = 227 << 10;

/// Maximum head dimension of forward launches that continue earlier launches (Continuation). A continuing launch loads
/// the output of the earlier launches into an output tile. Shared memory holds an output tile in addition to the query
/// tile only up to this head dimension.
inline constexpr std::int64_t kLargestContinuedHeadDim = 128;

/// Minimum number of query tiles per CTA for dynamic scheduling, in which CTAs take tiles from a counter. With fewer
/// tiles, clearing the counter before the launch takes longer than dynamic scheduling saves.
inline constexpr std::int64_t kTilesWorthCounting = 4;

/// A form of a kernel: its maximum head dimension, and the maximum numbers of queries and keys in its tiles.
struct Form {
  int head_dim;
  int queries;
  int keys;
};

/// Number of head elements over which a wgmma instruction with 16-bit operands sums. A k-step is one such instruction
/// of a product.
inline constexpr int kStep = 16;

/// True if a product over heads of `head_dim` elements takes fewer k-steps than a product over heads of `form_head_dim`
/// elements. Only the kernels for such narrow heads check in each product where the head ends. In the other kernels,
/// this check would slow down forward passes by 2 to 7% (H100, heads of 128).
constexpr bool is_narrow(std::int64_t head_dim, int form_head_dim) {
  return head_dim <= form_head_dim - kStep;
}

/// Forms are sorted by head dimension, then by tile size. In the forward kernels, each consumer warpgroup computes 64
/// queries of a tile, so `queries` also determines the number of these warpgroups.
inline constexpr Form kForwardForms[] = {
    {64, 128, 128}, {64, 192, 128}, {128, 128, 96}, {128, 128, 128}, {192, 128, 96}, {256, 128, 64},
};
inline constexpr Form kFloat8ForwardForms[] = {{64, 128, 128}, {128, 128, 128}, {256, 128, 64}};
inline constexpr Form kBackwardForms[] = {{64, 64, 128}, {128, 64, 128}, {256, 64, 64}};

}  // namespace natten_jax::sm90
