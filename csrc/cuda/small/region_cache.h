// Regions that were chosen before: choosing one takes the host longer than all else that a launch does.
#pragma once

#include "cuda/small/region.h"
#include "cuda/small/ring_shape.h"

namespace natten_jax::small {

/// As choose_region, which is asked once for each kind of launch: 16 to 32 microseconds, against a fraction of one.
Status find_region(const Problem& problem, const std::int64_t (&rows)[kRank], const std::int64_t (&columns)[kRank],
                   Kernel kernel, Places places, const Device& device, Region& region);

/// Likewise choose_gradient_ring.
RingShape find_gradient_ring(const Problem& problem, Places places, RingLoads loads, const Device& device);

/// Likewise choose_ring_before; none where there is no region either.
RingShape find_ring(const Problem& problem, const std::int64_t (&rows)[kRank], const std::int64_t (&columns)[kRank],
                    Kernel kernel, Places places, RingLoads loads, const Device& device);

}  // namespace natten_jax::small
