// Prepares launches of kernels with a relative bias: tables that are added to products of queries and keys, and the
// sums for the gradient of the bias.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/common/launch.cuh"
#include "cuda/small/given_table.h"
#include "cuda/small/launch.h"
#include "cuda/small/params.h"
#include "cuda/small/table_kernels.h"
#include "cuda/small/whole_bias.h"
#include "natten_jax/arrays.h"
#include "natten_jax/problem.h"
#include "natten_jax/status.h"

namespace natten_jax::small {

/// Returns a problem's tables, for kernels that read tables with `line` entries per line.
GivenTable given_table(const Problem& problem, std::int64_t line, const Arrays& arrays);

/// Computes the tables of products if there is a relative bias and the kernels read such tables.
Status make_products(const Problem& problem, const std::int64_t (&rows)[kRank], const std::int64_t (&columns)[kRank],
                     const Arrays& arrays, float* products, cudaStream_t stream, CommonParams& p);

/// If there is a relative bias, fills in the parameters for its gradient: of the query gradient kernel, and of the
/// kernels that add up the records of that kernel.
Status prepare_table(const Problem& problem, const TileShapes& tiles, const Arrays& arrays, const Scratch& scratch,
                     cudaStream_t stream, BackwardParams& p, TableParams& table, LaunchShape& shape,
                     LastSumsParams& last);

/// Fills in the parameters for a relative bias's gradient in the kernel of whole layouts, each of whose CTAs loops over
/// batch entries of a single head. Returns false if there are too many CTAs.
bool prepare_whole_bias(const Problem& problem, const TileShapes& tiles, const Arrays& arrays, const Scratch& scratch,
                        WholeBiasParams& p, LaunchShape& shape, LastSumsParams& last);

}  // namespace natten_jax::small
