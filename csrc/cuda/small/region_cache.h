// Cache of chosen regions. On the host, choosing a region takes longer than the rest of a launch.
#pragma once

#include "cuda/small/region.h"
#include "cuda/small/ring_shape.h"

namespace natten_jax::small {

/// Like choose_region, but cached: choosing a region takes 16 to 32 microseconds, and a lookup takes less than one.
Status find_region(const Problem& problem, const std::int64_t (&rows)[kRank], const std::int64_t (&columns)[kRank],
                   Kernel kernel, Coverage coverage, const Device& device, Region& region);

/// Like choose_gradient_ring, but cached.
RingShape find_gradient_ring(const Problem& problem, Coverage coverage, RingLoads loads, const Device& device);

/// Like choose_faster_ring, but cached, and `warps` of the result is also 0 if no region fits.
RingShape find_ring(const Problem& problem, const std::int64_t (&rows)[kRank], const std::int64_t (&columns)[kRank],
                    Kernel kernel, Coverage coverage, RingLoads loads, const Device& device);

}  // namespace natten_jax::small
