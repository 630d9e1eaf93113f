// Preparation of launches with a relative bias. It computes the tables of biases that kernels add to products of
// queries and keys, and the parameters of the kernels that compute the gradient of the bias.
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

/// Returns a description of the caller's tables, for kernels whose tables have `line` entries per line.
GivenTable given_table(const Problem& problem, std::int64_t line, const Arrays& arrays);

/// If there is a relative bias, launches the kernel that converts the caller's tables to tables that are added to
/// products of queries and keys. The kernel writes the converted tables to `products`.
Status make_products(const Problem& problem, const std::int64_t (&rows)[kRank], const std::int64_t (&columns)[kRank],
                     const Arrays& arrays, float* products, cudaStream_t stream, CommonParams& p);

/// If there is a relative bias, sets the parameters of the kernels that compute its gradient. The query gradient kernel
/// (`p`) writes a record per tile. The next kernel (`table`, `shape`) adds up the records of each part of the tiles.
/// The final kernel (`last`) adds up the sums of all parts.
Status prepare_table(const Problem& problem, const TileShapes& tiles, const Arrays& arrays, const Scratch& scratch,
                     cudaStream_t stream, BackwardParams& p, TableParams& table, LaunchShape& shape,
                     LastSumsParams& last);

/// Sets the parameters for the gradient of a relative bias in the kernel that processes whole layouts. A CTA of this
/// kernel loops over batch entries of a single head. Returns false if the launch would need too many CTAs.
bool prepare_whole_bias(const Problem& problem, const TileShapes& tiles, const Arrays& arrays, const Scratch& scratch,
                        WholeBiasParams& p, LaunchShape& shape, LastSumsParams& last);

}  // namespace natten_jax::small
