// Launches the kernels around those that add a relative bias: what prepares tables, and what adds their gradients up.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/small/given_table.h"
#include "natten_jax/problem.h"

namespace natten_jax::small {

/// For tables in products of queries and keys.
struct TableProductsParams {
  GivenTable given;
  Scale scale;
  float* products;  // [tables, heads, entries]
  int entries;      // filled up to chunks
  int heads;
};

/// For the last sums of gradients of tables: result[table][offset] = sum of sums[table][sum][offset] over all `sums`.
struct LastSumsParams {
  const float* sums;
  float* result;            // [tables, offsets]
  std::int64_t next_table;  // numbers from the sums of a table to those of the next one, in chunks of 16 bytes
  std::int64_t next_sum;    // and from a table's sum to its next
  int count;                // sums of a table
  int offsets;
};

/// Launches them, for so many tables of heads.
cudaError_t launch_table_products(const TableProductsParams& params, int tables, cudaStream_t stream);
cudaError_t launch_last_sums(const LastSumsParams& params, int tables, cudaStream_t stream);

}  // namespace natten_jax::small
