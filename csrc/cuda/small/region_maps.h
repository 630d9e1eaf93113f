// TMA tensor maps of the columns of regions; unused for regions without boxes.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "cuda/small/params.h"
#include "natten_jax/problem.h"
#include "natten_jax/status.h"

namespace natten_jax::small {

/// Encodes the maps of the keys and values that queries see.
Status encode_keys(const Problem& problem, const void* key, const void* value, CommonParams& p);

/// Encodes the maps of the queries that see keys and of their statistics; `arrays` are the parameters of another
/// kernel.
Status encode_queries(const Problem& problem, const BackwardParams& arrays, CommonParams& p);

/// Encodes the maps for the kernel of whole layouts, in the order of WholeBox.
Status encode_whole(const Problem& problem, BackwardParams& p);

/// Makes the maps of batch entries with separate layouts from the maps of the whole arrays.
///
/// Args:
///   are_queries: true if columns are queries, false if they are keys.
///   result: scratch memory, [batch, kEntryMaps].
///   overlaps: true if the previous kernel also makes maps (PDL).
Status make_entry_maps(const Problem& problem, bool are_queries, CUtensorMap* result, cudaStream_t stream,
                       CommonParams& p, bool overlaps = false);

}  // namespace natten_jax::small
