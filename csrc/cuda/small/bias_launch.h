// Prepares launches of kernels with a relative bias: its tables of products, and the sums of its gradient.
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

/// A problem's tables, as kernels with `line` entries per line read them.
GivenTable given_table(const Problem& problem, std::int64_t line, const Arrays& arrays);

/// Computes the tables of products if there is a relative bias and the kernels read such tables.
Status make_products(const Problem& problem, const std::int64_t (&rows)[kRank], const std::int64_t (&columns)[kRank],
                     const Arrays& arrays, float* products, cudaStream_t stream, CommonParams& p);

/// Fills in the parameters for a relative bias's gradient, if there is one: of the kernel of query gradients, and of
/// the kernels that add up its records.
Status prepare_table(const Problem& problem, const TileShapes& tiles, const Arrays& arrays, const Scratch& scratch,
                     cudaStream_t stream, BackwardParams& p, TableParams& table, LaunchShape& shape,
                     LastSumsParams& last);

/// Fills in these parameters for the kernel of all gradients, whose CTAs have batch entries of a single head each;
/// false if there are too many CTAs.
bool prepare_whole_bias(const Problem& problem, const TileShapes& tiles, const Arrays& arrays, const Scratch& scratch,
                        WholeBiasParams& p, LaunchShape& shape, LastSumsParams& last);

}  // namespace natten_jax::small
