// Shape of a region: layout of its box, tables and stages in a CTA's shared memory.
#pragma once

#include "cuda/small/region_side.h"

namespace natten_jax::small {

/// Fills in the fields that all regions of a problem with these tiles share.
///
/// Returns:
///   An error if the kernels for small windows do not support the problem or tiles.
Status begin_region(const Problem& problem, const Side (&sides)[kRank], const std::int64_t (&rows)[kRank],
                    const std::int64_t (&columns)[kRank], Region& region);

/// Derives the remaining fields from the number of tiles in each dimension; false if a CTA's memory does not suffice.
bool complete_region(const Problem& problem, const Side (&sides)[kRank], Kernel kernel, int head_dim, int stages,
                     const Device& device, Region& region);

}  // namespace natten_jax::small
