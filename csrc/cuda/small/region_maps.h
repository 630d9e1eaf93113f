// TMA tensor maps, with which kernels load the columns of regions. Unused for regions without boxes.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "cuda/small/params.h"
#include "natten_jax/problem.h"
#include "natten_jax/status.h"

namespace natten_jax::small {

/// Encodes the maps of keys and values, the columns of kernels that own queries.
Status encode_keys(const Problem& problem, const void* key, const void* value, CommonParams& p);

/// Encodes the maps of queries, dO and statistics, the columns of the kernel that owns keys. The addresses of these
/// arrays come from `arrays`, which may be the parameters of another kernel.
Status encode_queries(const Problem& problem, const BackwardParams& arrays, CommonParams& p);

/// Encodes the maps for the kernel of whole layouts, in the order of WholeBox.
Status encode_whole(const Problem& problem, BackwardParams& p);

/// Makes a separate set of maps for every batch entry from the maps of the whole arrays. Does nothing without per-entry
/// layouts or without boxes.
///
/// Args:
///   are_queries: true if columns are queries, false if they are keys.
///   result: scratch memory, [batch, kEntryMaps].
///   overlaps: true if the previous kernel of the stream also makes maps, so that both may overlap (PDL).
Status make_entry_maps(const Problem& problem, bool are_queries, CUtensorMap* result, cudaStream_t stream,
                       CommonParams& p, bool overlaps = false);

}  // namespace natten_jax::small
