// Scales of logits and sinks, where heads have some of their own.
#pragma once

#include "cuda/common/arithmetic.cuh"
#include "cuda/small/copies.cuh"
#include "natten_jax/added_logit.h"

namespace natten_jax::small {

/// Where scales of logits and sinks are: one scale of all heads is a parameter, which costs no register, or heads may
/// have some of their own. With a kernel for both, clips and volumes took 3% longer in the forward pass.
enum class Terms { kOfAll, kOfHeads };

/// In forward passes, those of the item that a warp computes. Where `kOfLanes`, each lane has those of one of the CTA's
/// items: where an item's are loaded as it is computed, warps wait for them, and take 40 instructions more than for one
/// scale of all heads (14 x 14 tokens: 9% of a pass on an H100). Kernels that spill registers as it is have none for
/// that.
template <bool kAreThere, bool kOfLanes, class Items>
class HeadTerms {
 public:
  CUTE_DEVICE HeadTerms(const ForwardParams& p, const Items& items) : p_(p), items_(items) {
    if constexpr (kAreThere && kOfLanes) load(0);
  }

  /// Goes on to the next item, at first to the first one. All of a warp call it.
  CUTE_DEVICE void next(const Item& item) {
    if constexpr (kAreThere && kOfLanes) {
      if (++place_ == 32) load(first_ + 32);
    } else if constexpr (kAreThere) {
      take(item);
    }
  }

  /// Scale of the item's logits in base 2.
  CUTE_DEVICE float exponent_scale() const { return kAreThere ? of_item(exponent_scale_) : p_.exponent_scale; }

  /// The item's sink, or -infinity without sinks. Converted here: a conversion in `take` would wait for the load.
  CUTE_DEVICE float sink() const { return kAreThere ? added_logit(of_item(sink_)) : -INFINITY; }

 private:
  CUTE_DEVICE float of_item(float number) const { return kOfLanes ? __shfl_sync(0xffffffffu, number, place_) : number; }

  CUTE_DEVICE void take(const Item& item) {
    exponent_scale_ = item.exponent_scale(p_);
    sink_ = item.sink(p_);
  }

  /// Has lane 0 have the terms of the CTA's item `first`, and so on.
  CUTE_DEVICE void load(int first) {
    const int lane = threadIdx.x % 32;
    take(items_.at(p_, min(first + lane, items_.count - 1)));
    first_ = first;
    place_ = first == 0 ? -1 : 0;
  }

  const ForwardParams& p_;
  const Items& items_;
  float exponent_scale_, sink_;
  int first_, place_;  // the item that lane 0 has, and the lane of the one at hand
};

}  // namespace natten_jax::small
