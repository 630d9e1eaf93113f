// The shape of a region: how its box, its tables and its stages lie in a CTA's shared memory.
#pragma once

#include "cuda/small/region_side.h"

namespace natten_jax::small {

/// Fills in what all regions of a problem with these tiles have in common.
///
/// Returns:
///   An error where the form for small windows takes no such problem or tiles.
Status begin_region(const Problem& problem, const Side (&sides)[kRank], const std::int64_t (&rows)[kRank],
                    const std::int64_t (&columns)[kRank], Region& region);

/// Works out what follows from the number of tiles in each dimension; false where a CTA lacks the memory for it.
bool complete_region(const Problem& problem, const Side (&sides)[kRank], Kernel kernel, int head_dim, int stages,
                     const Device& device, Region& region);

}  // namespace natten_jax::small
