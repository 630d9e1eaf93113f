// Launches the kernels that prepare tables of a relative bias, and that add up their gradients.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/small/given_table.h"
#include "natten_jax/problem.h"

namespace natten_jax::small {

/// Parameters of the kernel that prepares tables to be added to products of queries and keys.
struct TableProductsParams {
  GivenTable given;
  Scale scale;
  float* products;  // [tables, heads, entries]
  int entries;      // padded to chunks
  int heads;
};

/// Parameters of the last sums of table gradients: result[table][offset] = sum of sums[table][sum][offset] over all
/// `sums`.
struct LastSumsParams {
  const float* sums;
  float* result;            // [tables, offsets]
  std::int64_t next_table;  // distance between the sums of two tables, in chunks of 16 bytes
  std::int64_t next_sum;    // distance between two sums of a table, in the same unit
  int count;                // sums per table
  int offsets;
};

/// Launch the kernels. `tables` counts the tables of all heads.
cudaError_t launch_table_products(const TableProductsParams& params, int tables, cudaStream_t stream);
cudaError_t launch_last_sums(const LastSumsParams& params, int tables, cudaStream_t stream);

}  // namespace natten_jax::small
