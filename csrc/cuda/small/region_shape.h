// Computes the fields of Region that describe the extents of a region and the layout of its shared memory.
#pragma once

#include "cuda/small/region_side.h"

namespace natten_jax::small {

/// Fills in the fields that do not depend on the number of tiles of a region.
///
/// Returns:
///   An error if the kernels for small windows do not support the problem or tiles.
Status begin_region(const Problem& problem, const Side (&sides)[kRank], const std::int64_t (&rows)[kRank],
                    const std::int64_t (&columns)[kRank], Region& region);

/// Computes the remaining fields from `region.tiles`, the number of tiles in each dimension. Returns false if a CTA has
/// not enough shared memory for the region.
bool complete_region(const Problem& problem, const Side (&sides)[kRank], Kernel kernel, int head_dim, int stages,
                     const Device& device, Region& region);

}  // namespace natten_jax::small
