#include "cuda/common/arithmetic.cuh"
#include "cuda/common/cuda_status.h"
#include "cuda/common/launch.cuh"
#include "cuda/small/sinks_gradient.h"
#include "cuda/small/sinks_parts.cuh"
#include "cuda/small/table_kernels.h"
#include "natten_jax/logsumexp.h"

namespace natten_jax::small {
namespace {

constexpr int kThreads = 256, kLoads = 8;

struct SinksGradientParams {
  const float* sinks;        // [batch_of_sinks, heads]
  const float* logsumexp;    // [batch, queries, heads]; includes the sinks
  const float4* statistics;  // [batch, queries, heads]; include the sinks
  float* parts;              // [batch_of_sinks, next_sinks / filled_heads, filled_heads]
  std::int64_t rows;         // number of queries per head that have the same sink
  std::int64_t next_sinks;   // distance in numbers between the parts of consecutive batch entries of `sinks`
  int heads, filled_heads;
  int heads_of_cta, rows_of_cta;  // numbers of heads and rows that a CTA handles at once; rows_of_cta is a power of two
  int rows_of_part;
};

/// Computes parts of the gradient. A CTA handles some of the heads for one part of the queries. Each of its threads
/// handles one head, and only every `rows_of_cta`-th query, so that neighboring threads read neighboring memory.
__global__ void __launch_bounds__(kThreads, 2)
    natten_jax_small_sinks_gradient(const __grid_constant__ SinksGradientParams p) {
  __shared__ float sums[kThreads];
  const int thread_head = threadIdx.x % p.heads_of_cta, thread_row = threadIdx.x / p.heads_of_cta,
            head = blockIdx.z * p.heads_of_cta + thread_head;
  const std::int64_t first = std::int64_t{blockIdx.y} * p.rows_of_part, base_row = blockIdx.x * p.rows,
                     end = min(first + p.rows_of_part, p.rows);
  float sum = 0.f;
  if (head < p.heads && thread_row < p.rows_of_cta) {
    const float sink = p.sinks[blockIdx.x * p.heads + head];
    const auto share = [&](float logsumexp, float delta) {
      // The weight is 0 if a query sees neither keys nor a sink. This includes the queries in padding, whose delta is
      // arbitrary.
      return logsumexp == -INFINITY ? 0.f : fast_exp2(at_most_zero((sink - logsumexp) * kLog2E)) * delta;
    };
    const std::int64_t step = std::int64_t{p.rows_of_cta} * p.heads,
                       at = (base_row + first + thread_row) * p.heads + head;
    const float* logsumexp = p.logsumexp + at;
    const float* delta = &p.statistics[at].y;
    int rows = (static_cast<int>(end - first) - thread_row + p.rows_of_cta - 1) / p.rows_of_cta;
    for (; rows >= kLoads; rows -= kLoads) {
      // Issue all loads before the first use. With one load at a time, 200,704 queries of two heads took 16
      // microseconds.
      float a[kLoads], b[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        a[i] = logsumexp[i * step];
        b[i] = delta[4 * i * step];
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) sum += share(a[i], b[i]);
      logsumexp += kLoads * step;
      delta += 4 * kLoads * step;
    }
    for (; rows > 0; --rows, logsumexp += step, delta += 4 * step) sum += share(*logsumexp, *delta);
  }
  sums[threadIdx.x] = sum;
  for (int half = p.rows_of_cta / 2; half > 0; half /= 2) {
    __syncthreads();
    if (thread_row < half) sums[threadIdx.x] += sums[threadIdx.x + half * p.heads_of_cta];
  }
  // The gradient is negative, because a sink reduces all other weights without adding a value.
  if (thread_row == 0 && head < p.filled_heads) {
    p.parts[blockIdx.x * p.next_sinks + blockIdx.y * p.filled_heads + head] = -sums[threadIdx.x];
  }
}

constexpr int kMostSumThreads = 1024;

__global__ void __launch_bounds__(kMostSumThreads) natten_jax_small_sinks_sums(const __grid_constant__ SinksParams p) {
  extern __shared__ float warp_sums[];
  add_up_sinks(p, warp_sums);
}

}  // namespace

cudaError_t launch_sums_of_sinks(const SinksParams& params, bool overlaps, cudaStream_t stream) {
  // Use at most one thread per chunk, to keep the CTA small. A small CTA fits on an SM next to CTAs of the previous
  // kernel, and waits there until the previous kernel ends (PDL).
  const int chunks = (params.parts_of_sink + kEntriesOfChunk - 1) / kEntriesOfChunk;
  const int threads = std::clamp(static_cast<int>(divide_up(chunks, 32)) * 32, 32, kMostSumThreads);
  const int shared_memory = threads / 32 * static_cast<int>(sizeof(float));
  return launch(natten_jax_small_sinks_sums, {dim3(params.count), threads, shared_memory, stream, overlaps}, params);
}

Status run_sinks_gradient(const Problem& problem, const Arrays& arrays, const float* statistics, float* parts,
                          cudaStream_t stream) {
  const std::int64_t most_parts = parts_of_sinks(arrays.batch_of_sinks), heads = problem.heads;
  SinksGradientParams p{};
  p.sinks = arrays.sinks;
  p.logsumexp = arrays.logsumexp;
  p.statistics = reinterpret_cast<const float4*>(statistics);
  p.parts = parts;
  p.rows = problem.batch / arrays.batch_of_sinks * problem.queries();
  p.heads = static_cast<int>(heads);
  p.filled_heads = static_cast<int>(filled_to_chunks(heads));
  p.next_sinks = most_parts * p.filled_heads;
  p.heads_of_cta = std::min(p.filled_heads, kThreads);
  for (p.rows_of_cta = 1; 2 * p.rows_of_cta * p.heads_of_cta <= kThreads;) p.rows_of_cta *= 2;
  const std::int64_t at_once = std::int64_t{p.rows_of_cta} * kLoads;
  p.rows_of_part = static_cast<int>(divide_up(divide_up(p.rows, most_parts), at_once) * at_once);
  const std::int64_t count = divide_up(p.rows, p.rows_of_part);
  const dim3 blocks(static_cast<unsigned>(arrays.batch_of_sinks), static_cast<unsigned>(count),
                    static_cast<unsigned>(divide_up(p.filled_heads, p.heads_of_cta)));
  cudaError_t error = launch(natten_jax_small_sinks_gradient, {blocks, kThreads, 0, stream}, p);
  if (error != cudaSuccess) return status_of(error);
  LastSumsParams last{};
  last.sums = parts;
  last.result = arrays.sinks_gradient;
  last.next_table = p.next_sinks / kEntriesOfChunk;
  last.next_sum = p.filled_heads / kEntriesOfChunk;
  last.count = static_cast<int>(count);
  last.offsets = p.heads;
  return status_of(launch_last_sums(last, static_cast<int>(arrays.batch_of_sinks), stream));
}

}  // namespace natten_jax::small
