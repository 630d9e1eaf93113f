#include "cuda/common/launch.cuh"
#include "cuda/small/table_kernels.h"

namespace natten_jax::small {
namespace {

constexpr int kProductsThreads = 128;

/// Converts relative biases to terms that kernels add to unscaled products of queries and keys (given_table.h). The
/// result is one table per head, or one table per batch entry and head. A CTA computes 128 consecutive entries of one
/// table.
__global__ void __launch_bounds__(kProductsThreads)
    natten_jax_small_table_products(const __grid_constant__ TableProductsParams p) {
  const std::int64_t item = blockIdx.x;
  const float* const table = p.given.head_table(item, static_cast<int>(item % p.heads));
  const float scale = p.scale.for_head(item).logits;
  float* const products = p.products + item * p.entries;
  const int entry = blockIdx.y * kProductsThreads + threadIdx.x;
  if (entry >= p.entries) return;
  const int offset = p.given.offset_of(entry);
  products[entry] = offset < 0 ? 0.f : GivenTable::product_of(table[offset], scale);
}

/// Number of threads of a CTA that adds up sums, and their distribution over chunks of these sums. A chunk is four
/// consecutive offsets. Each thread loads one chunk of every 32nd sum. Eight neighboring threads load eight consecutive
/// chunks of a sum.
constexpr int kSumThreads = 256, kChunksAtOnce = 8, kSumsAtOnce = kSumThreads / kChunksAtOnce, kOffsetsPerChunk = 4;

/// Adds up the sums of each table (LastSumsParams). A CTA computes 32 consecutive offsets of one table.
__global__ void __launch_bounds__(kSumThreads) natten_jax_small_last_sums(const __grid_constant__ LastSumsParams p) {
  __shared__ float4 parts[kSumsAtOnce][kChunksAtOnce];
  const int thread_chunk = threadIdx.x % kChunksAtOnce, thread_sum = threadIdx.x / kChunksAtOnce,
            chunk = blockIdx.y * kChunksAtOnce + thread_chunk;
  const bool is_inside = chunk * kOffsetsPerChunk < p.offsets;
  const float4* sums = reinterpret_cast<const float4*>(p.sums) + blockIdx.x * p.next_table + (is_inside ? chunk : 0);
  float4 part = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 8
  for (int i = thread_sum; i < p.count; i += kSumsAtOnce) {
    const float4 sum = sums[i * p.next_sum];
    part.x += sum.x;
    part.y += sum.y;
    part.z += sum.z;
    part.w += sum.w;
  }
  parts[thread_sum][thread_chunk] = part;
  __syncthreads();
  // Each of the first 32 threads adds up one offset's partial sums, in a fixed order.
  constexpr int kOffsets = kChunksAtOnce * kOffsetsPerChunk;
  const int offset = blockIdx.y * kOffsets + threadIdx.x;
  if (threadIdx.x >= kOffsets || offset >= p.offsets) return;
  float result = 0.f;
#pragma unroll
  for (int i = 0; i < kSumsAtOnce; ++i) result += reinterpret_cast<const float*>(parts[i])[threadIdx.x];
  p.result[std::int64_t{blockIdx.x} * p.offsets + offset] = result;
}

}  // namespace

cudaError_t launch_table_products(const TableProductsParams& params, int tables, cudaStream_t stream) {
  const int parts = (params.entries + kProductsThreads - 1) / kProductsThreads;
  return launch(natten_jax_small_table_products, {dim3(tables, parts), kProductsThreads, 0, stream}, params);
}

cudaError_t launch_last_sums(const LastSumsParams& params, int tables, cudaStream_t stream) {
  constexpr int kOffsets = kChunksAtOnce * kOffsetsPerChunk;
  const int parts = (params.offsets + kOffsets - 1) / kOffsets;
  return launch(natten_jax_small_last_sums, {dim3(tables, parts), kSumThreads, 0, stream}, params);
}

}  // namespace natten_jax::small
