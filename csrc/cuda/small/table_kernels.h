// Launches two kernels for relative biases. The first one converts the biases to the tables that a pass reads. The
// second one adds up partial sums to the gradients of the tables, after a backward pass.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/small/given_table.h"
#include "natten_jax/problem.h"

namespace natten_jax::small {

/// Parameters of the kernel that converts relative biases to terms of unscaled products of queries and keys.
struct TableProductsParams {
  GivenTable given;
  Scale scale;
  float* products;  // [tables, heads, entries]
  int entries;      // per table, padded to chunks of 16 bytes
  int heads;
};

/// Parameters of the kernel that adds up partial sums: result[table][offset] is the sum of sums[table][i][offset] over
/// all i < count.
struct LastSumsParams {
  const float* sums;
  float* result;            // [tables, offsets]
  std::int64_t next_table;  // distance between the first sums of consecutive tables, in chunks of 16 bytes
  std::int64_t next_sum;    // distance between consecutive sums of a table, in chunks of 16 bytes
  int count;                // sums per table
  int offsets;
};

/// Launch the kernels. `tables`: number of tables to compute.
cudaError_t launch_table_products(const TableProductsParams& params, int tables, cudaStream_t stream);
cudaError_t launch_last_sums(const LastSumsParams& params, int tables, cudaStream_t stream);

}  // namespace natten_jax::small
