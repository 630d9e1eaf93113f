// The forms that the Hopper kernels are compiled in, and what they take. Plain numbers: the launches choose by them,
// the kernels are instantiated from them, and Python reads them in every build.
#pragma once

#include <cstdint>

namespace natten_jax::sm90 {

/// Head dimensions are multiples of it: rows of tensor maps lie at multiples of 16 bytes.
inline constexpr std::int64_t kHeadDimStep = 8;
inline constexpr std::int64_t kFloat8HeadDimStep = 16;
inline constexpr std::int64_t kLargestHeadDim = 256;

/// Bytes of shared memory that a CTA may have.
inline constexpr int kSharedMemory = 227 << 10;

/// The widest heads for which an output tile has room beside a query tile. Forward launches of these can continue
/// others, whose output they fetch to there.
inline constexpr std::int64_t kLargestContinuedHeadDim = 128;

/// Tiles per CTA from which on it pays to clear a counter first, so that whoever is done takes the next one.
inline constexpr std::int64_t kTilesWorthCounting = 4;

/// A form of a kernel: the widest heads that it takes, and the most tokens of its tiles.
struct Form {
  int head_dim;
  int queries;
  int keys;
};

/// Elements of a head that products sum over at a time.
inline constexpr int kStep = 16;

/// Whether products over heads take fewer steps than those over a form's. Kernels for such heads are compiled apart:
/// to ask where products end would make forward passes with heads of 128 from 2 to 7% slower (H100).
constexpr bool is_narrow(std::int64_t head_dim, int form_head_dim) {
  return head_dim <= form_head_dim - kStep;
}

/// By head dimension; of the forms for one, those that do less come first. Each 64 queries are a warpgroup's.
inline constexpr Form kForwardForms[] = {
    {64, 128, 128}, {64, 192, 128}, {128, 128, 96}, {128, 128, 128}, {192, 128, 96}, {256, 128, 64},
};
inline constexpr Form kFloat8ForwardForms[] = {{64, 128, 128}, {128, 128, 128}, {256, 128, 64}};
inline constexpr Form kBackwardForms[] = {{64, 64, 128}, {128, 64, 128}, {256, 64, 64}};

}  // namespace natten_jax::sm90
