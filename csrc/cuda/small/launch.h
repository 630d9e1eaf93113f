// Launches the kernels for small windows. This is the interface between the FFI handlers and csrc/cuda/small.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "natten_jax/arrays.h"
#include "natten_jax/problem.h"
#include "natten_jax/status.h"

namespace natten_jax::small {

/// Returns an error if the kernels do not support the problem's elements and heads.
Status check_arrays(const Problem& problem);

/// Return the number of tensor maps of batch entries, for which a pass needs scratch memory; 0 without per-entry
/// layouts.
std::int64_t entry_maps_of_forward(const Problem& problem, const Arrays& arrays);
std::int64_t entry_maps_of_backward(const Problem& problem, const Arrays& arrays);

/// Runs the forward pass of a checked problem on a stream. Query tiles have 16 tokens, key/value tiles 8.
///
/// Args:
///   table_products: scratch memory for a relative bias: floats [tables_of_products(), heads, entries], where
///     `BiasTable` (bias_table.h) defines `entries`.
Status run_forward(const Problem& problem, const TileShapes& tiles, const Arrays& arrays, float* table_products,
                   CUtensorMap* entry_maps, cudaStream_t stream);

/// Scratch memory of a backward pass.
struct Scratch {
  float* statistics;       ///< [batch, tokens, heads, 4].
  float* additional_sums;  ///< [additional_parts(), batch, additional_kv, heads_kv, head_dim + head_dim_v].
  // For a relative bias, with sizes from `BiasTable` and `BiasSums` (bias_table.h).
  float* table_products;  ///< [tables_of_products(), heads, entries].
  float* table_records;   ///< [batch, heads, tiles, record].
  float* table_sums;      ///< [parts, batch, heads, gradients].
  float* sinks;           ///< scratch_of_sinks() numbers (sinks_gradient.h).
  CUtensorMap* entry_maps;
};

/// Runs the backward pass of a checked problem on a stream. Key/value tiles have 16 tokens, query tiles 8. Results are
/// deterministic.
Status run_backward(const Problem& problem, const TileShapes& tiles, const Arrays& arrays, const Scratch& scratch,
                    cudaStream_t stream);

}  // namespace natten_jax::small
