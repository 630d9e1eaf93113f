// Tensor maps of the columns of regions, for the copy engine: where regions have no boxes, there are none.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "cuda/small/params.h"
#include "natten_jax/problem.h"
#include "natten_jax/status.h"

namespace natten_jax::small {

/// Encodes the maps of the keys and values that queries see.
Status encode_keys(const Problem& problem, const void* key, const void* value, CommonParams& p);

/// The same for the queries that see keys, and what is known of them: arrays as another kernel's parameters have them.
Status encode_queries(const Problem& problem, const BackwardParams& arrays, CommonParams& p);

/// The same for the kernel of whole layouts, in the order of WholeBox.
Status encode_whole(const Problem& problem, BackwardParams& p);

/// Makes the maps of batch entries with layouts of their own from those of all.
///
/// Args:
///   are_queries: that columns are queries, or else keys.
///   result: scratch memory, [batch, kEntryMaps].
///   overlaps: others are made right before.
Status make_entry_maps(const Problem& problem, bool are_queries, CUtensorMap* result, cudaStream_t stream,
                       CommonParams& p, bool overlaps = false);

}  // namespace natten_jax::small
