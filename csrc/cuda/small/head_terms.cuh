// Per-head scales of logits, and sinks.
#pragma once

#include "cuda/common/arithmetic.cuh"
#include "cuda/small/copies.cuh"

namespace natten_jax::small {

/// Source of the scale of logits, and of sinks:
///
/// - kShared: a single scale for all heads, which is a kernel parameter and needs no register; no sinks.
/// - kPerHead: per-head scales and sinks.
///
/// When one kernel served both cases, forward passes of video clips and volumes took 3% longer.
enum class Terms { kShared, kPerHead };

/// Scale and sink of the item that a warp computes in a forward pass. With `kInLanes`, lane i holds the scale and sink
/// of the CTA's item `first_ + i`. Without it, a warp loads both for each item. These loads stall the warp, and take 40
/// instructions more than a single scale. In total, they cost 9% of a pass for 14 x 14 tokens on an H100. Kernels that
/// already spill registers cannot afford `kInLanes`.
template <bool kAreThere, bool kInLanes, class Items>
class HeadTerms {
 public:
  CUTE_DEVICE HeadTerms(const ForwardParams& p, const Items& items) : p_(p), items_(items) {
    if constexpr (kAreThere && kInLanes) load(0);
  }

  /// Advances to the next item; the first call advances to the first item. All lanes of a warp have to call it.
  CUTE_DEVICE void next(const Item& item) {
    if constexpr (kAreThere && kInLanes) {
      if (++item_lane_ == 32) load(first_ + 32);
    } else if constexpr (kAreThere) {
      take(item);
    }
  }

  /// Returns the factor that converts products of queries and keys to the item's logits in base 2.
  CUTE_DEVICE float exponent_scale() const { return kAreThere ? item_value(exponent_scale_) : p_.exponent_scale; }

  /// Returns the item's sink as passed by the caller, or -infinity without sinks.
  CUTE_DEVICE float sink() const { return kAreThere ? item_value(sink_) : -INFINITY; }

 private:
  CUTE_DEVICE float item_value(float number) const {
    return kInLanes ? __shfl_sync(0xffffffffu, number, item_lane_) : number;
  }

  CUTE_DEVICE void take(const Item& item) {
    exponent_scale_ = item.exponent_scale(p_);
    sink_ = item.sink(p_);
  }

  /// Loads the scales and sinks of the CTA's items `first` to `first + 31`, one item per lane.
  CUTE_DEVICE void load(int first) {
    const int lane = threadIdx.x % 32;
    take(items_.at(p_, min(first + lane, items_.count - 1)));
    first_ = first;
    item_lane_ = first == 0 ? -1 : 0;
  }

  const ForwardParams& p_;
  const Items& items_;
  float exponent_scale_, sink_;
  int first_, item_lane_;  // index of lane 0's item, and the lane of the current item
};

}  // namespace natten_jax::small
