#include <cutlass/fast_math.h>

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "cuda/common/arithmetic.cuh"
#include "cuda/common/constants.h"
#include "cuda/common/gradient_passes.h"
#include "cuda/common/launch.cuh"
#include "natten_jax/logsumexp.h"

namespace natten_jax {
namespace {

constexpr int kThreads = 256;
constexpr int kElements = 8;  // number of 16-bit elements in a chunk
constexpr int kChunkBytes = 16;
constexpr int kMostBlocks = 1 << 16;
constexpr int kClearingBlocks = 1024;  // few CTAs, so that the next kernel can start early
constexpr int kUnrolled = 4;           // rows or chunks that a thread loads at once

__device__ float2 to_floats(__half2 pair) {
  return __half22float2(pair);
}
__device__ float2 to_floats(__nv_bfloat162 pair) {
  return __bfloat1622float2(pair);
}
__device__ float2 to_floats(float2 pair) {
  return pair;
}

/// Dot product of two chunks.
template <class Element>
__device__ float dot(uint4 a, uint4 b) {
  using Pair = typename ElementTraits<Element>::Pair;
  const auto* a_pairs = reinterpret_cast<const Pair*>(&a);
  const auto* b_pairs = reinterpret_cast<const Pair*>(&b);
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(uint4) / sizeof(Pair)); ++i) {
    const float2 x = to_floats(a_pairs[i]), y = to_floats(b_pairs[i]);
    sum += x.x * y.x + x.y * y.y;
  }
  return sum;
}

/// Sum of the values of the `kLanes` neighboring threads that share a row.
template <int kLanes>
__device__ float sum_of_row(float sum) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  }
  return sum;
}

/// Rows of an array [batch, tokens, heads, head_dim].
struct Rows {
  std::int64_t tokens, heads;
  cutlass::FastDivmodU64 by_tokens, by_heads;

  Rows(std::int64_t tokens, std::int64_t heads) : tokens(tokens), heads(heads), by_tokens(tokens), by_heads(heads) {}

  struct Position {
    std::int64_t batch, head, token;
  };
  __device__ Position position(std::int64_t row) const {
    const std::int64_t in_batch = by_heads.divide(row), head = row - in_batch * heads;
    const std::int64_t batch = by_tokens.divide(in_batch), token = in_batch - batch * tokens;
    return {batch, head, token};
  }

  /// Index of a row in an array [batch, heads, tokens, head_dim].
  __device__ std::int64_t heads_first(const Position& at) const {
    return (at.batch * heads + at.head) * tokens + at.token;
  }
};

/// Computes the statistics of each row: the logsumexp in base 2, and delta. A row belongs to a query and a head.
/// `kLanes` neighboring threads share a row. `kIsPadded`: rows with a logsumexp of -infinity may be padding, so `out`
/// and `out_cotangent` are not read there.
template <class Element, int kLanes, bool kIsPadded>
__global__ void __launch_bounds__(kThreads)
    natten_jax_delta_reduction(const uint4* out, const uint4* out_cotangent, const float* logsumexp,
                               const float* logsumexp_cotangent, float2* statistics, const __grid_constant__ Rows rows,
                               std::int64_t all_rows, int chunks) {
  allow_next_kernel();
  constexpr int kBlockRows = kThreads / kLanes;  // at once
  const int lane = threadIdx.x % kLanes;
  const std::int64_t rows_per_block = kBlockRows * kUnrolled;
  for (std::int64_t first = blockIdx.x * rows_per_block; first < all_rows; first += gridDim.x * rows_per_block) {
    const std::int64_t own = first + threadIdx.x / kLanes;
    uint4 a[kUnrolled], b[kUnrolled];
    // With padding, check all rows of the thread before loading the first one.
    bool is_real[kUnrolled];
#pragma unroll
    for (int i = 0; i < kUnrolled; ++i) {
      const std::int64_t row = own + i * kBlockRows;
      is_real[i] = row < all_rows && lane < chunks;
      if constexpr (kIsPadded) is_real[i] = (is_real[i] ? logsumexp[row] : -INFINITY) != -INFINITY;
    }
#pragma unroll
    for (int i = 0; i < kUnrolled; ++i) {
      const std::int64_t at = (own + i * kBlockRows) * chunks + lane;
      a[i] = is_real[i] ? out[at] : make_uint4(0, 0, 0, 0);
      b[i] = is_real[i] ? out_cotangent[at] : make_uint4(0, 0, 0, 0);
    }
    float sum = 0.f;  // for the row whose statistics this thread writes
#pragma unroll
    for (int i = 0; i < kUnrolled; ++i) {
      const float row_sum = sum_of_row<kLanes>(dot<Element>(a[i], b[i]));
      if (lane == i) sum = row_sum;
    }
    const std::int64_t row = own + lane * kBlockRows;
    if (lane < kUnrolled && row < all_rows) {
      statistics[rows.heads_first(rows.position(row))] = make_float2(
          base2_logsumexp(logsumexp[row]), sum - (logsumexp_cotangent == nullptr ? 0.f : logsumexp_cotangent[row]));
    }
  }
}

/// Computes only delta, and not the logsumexp in base 2. The results have the order of the rows.
template <class Element, int kLanes>
__global__ void __launch_bounds__(kThreads, 8)
    natten_jax_row_delta_reduction(const uint4* out, const uint4* out_cotangent, const float* logsumexp_cotangent,
                                   float* delta, std::int64_t rows, int chunks) {
  const int lane = threadIdx.x % kLanes;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * (kThreads / kLanes);
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * (kThreads / kLanes) + threadIdx.x / kLanes;
  // Threads past the last row stay in the loop, because all threads of a warp must take part in its shuffles.
  for (std::int64_t row = first; row - threadIdx.x % 32 / kLanes < rows; row += step) {
    float sum = 0.f;
    // This loop usually has one iteration. If it were unrolled, the kernel would take 40 registers. Full occupancy
    // allows 32.
#pragma unroll 1
    for (int chunk = lane; row < rows && chunk < chunks; chunk += kLanes) {
      sum += dot<Element>(out[row * chunks + chunk], out_cotangent[row * chunks + chunk]);
    }
    sum = sum_of_row<kLanes>(sum);
    if (row < rows && lane == 0) delta[row] = sum - (logsumexp_cotangent == nullptr ? 0.f : logsumexp_cotangent[row]);
  }
}

/// Scales sums and rounds them to elements of the gradient. `row_statistics`: with padding, statistics of the rows, in
/// the order of the sums; otherwise null. If the logsumexp of a row is -infinity, its sums are undefined, and its
/// gradient is zero.
template <class Element>
__global__ void __launch_bounds__(kThreads)
    natten_jax_convert_gradient(const float4* sums, const float2* row_statistics, const __grid_constant__ Scale scales,
                                uint4* gradient, const __grid_constant__ Rows rows, std::int64_t all_chunks,
                                std::int64_t all_heads, int chunks,
                                const __grid_constant__ cutlass::FastDivmodU64 by_chunks) {
  wait_for_previous_kernel();
  allow_next_kernel();  // the next kernel only fills padding, of gradients that this kernel does not write
  const std::int64_t chunks_per_block = kThreads * kUnrolled;
  for (std::int64_t first = blockIdx.x * chunks_per_block + threadIdx.x; first < all_chunks;
       first += gridDim.x * chunks_per_block) {
    float4 low[kUnrolled], high[kUnrolled];
    std::int64_t from[kUnrolled], to[kUnrolled];
    float scale[kUnrolled];
    // With padding, check all rows of the thread before loading the first one.
    bool has_sums[kUnrolled];
#pragma unroll
    for (int i = 0; i < kUnrolled; ++i) {
      const std::int64_t at = first + i * kThreads, row = by_chunks.divide(at), chunk = at - row * chunks;
      const auto position = rows.position(row);
      const std::int64_t from_row = rows.heads_first(position);
      from[i] = from_row * chunks + chunk;
      to[i] = (row + rows.by_heads.divide(row) * (all_heads - rows.heads)) * chunks + chunk;
      has_sums[i] = at < all_chunks;
      if (has_sums[i]) {
        scale[i] = scales.for_head(position.batch * all_heads + position.head).query_gradient;
        if (row_statistics != nullptr) has_sums[i] = row_statistics[from_row].x != -INFINITY;
      }
    }
#pragma unroll
    for (int i = 0; i < kUnrolled; ++i) {
      low[i] = has_sums[i] ? sums[2 * from[i]] : make_float4(0.f, 0.f, 0.f, 0.f);
      high[i] = has_sums[i] ? sums[2 * from[i] + 1] : make_float4(0.f, 0.f, 0.f, 0.f);
    }
#pragma unroll
    for (int i = 0; i < kUnrolled; ++i) {
      const uint4 result = make_uint4(pack<Element>(low[i].x * scale[i], low[i].y * scale[i]),
                                      pack<Element>(low[i].z * scale[i], low[i].w * scale[i]),
                                      pack<Element>(high[i].x * scale[i], high[i].y * scale[i]),
                                      pack<Element>(high[i].z * scale[i], high[i].w * scale[i]));
      if (first + i * kThreads < all_chunks) gradient[to[i]] = result;
    }
  }
}

/// Fills elements with zeros. The first `quads` * 4 elements are written four at a time.
///
/// This kernel waits for the previous kernel before it lets the next kernel start. The next kernel reads operands that
/// kernels before this one have written, and does not wait for these kernels itself. If it could start earlier, these
/// kernels might still be writing.
///
/// Args:
///   row_statistics: with padding, statistics of the first `all_rows` rows: rows with a logsumexp of -infinity stay
///   unchanged.
///     Null without padding.
__global__ void __launch_bounds__(kThreads)
    natten_jax_clear(float* elements, std::int64_t quads, std::int64_t number, const float2* row_statistics,
                     std::int64_t all_rows, const __grid_constant__ cutlass::FastDivmodU64 by_row_quads) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kThreads;
  for (std::int64_t i = first; i < quads; i += step) {
    if (row_statistics != nullptr) {
      const std::int64_t row = by_row_quads.divide(i);
      if (row < all_rows && row_statistics[row].x == -INFINITY) continue;
    }
    reinterpret_cast<float4*>(elements)[i] = make_float4(0.f, 0.f, 0.f, 0.f);
  }
  for (std::int64_t i = 4 * quads + first; i < number; i += step) elements[i] = 0.f;
}

int blocks_for(std::int64_t threads) {
  return static_cast<int>(std::min<std::int64_t>((threads + kThreads - 1) / kThreads, kMostBlocks));
}
int unrolled_blocks_for(std::int64_t threads) {
  return blocks_for((threads + kUnrolled - 1) / kUnrolled);
}

}  // namespace

cudaError_t launch_statistics(ElementType type, const void* out, const void* out_cotangent, const float* logsumexp,
                              const float* logsumexp_cotangent, float* statistics, std::int64_t batch,
                              std::int64_t tokens, std::int64_t heads, std::int64_t head_dim, bool is_padded,
                              cudaStream_t stream) {
  const int chunks = static_cast<int>(head_dim / kElements);
  const auto launch_kernel = [&](auto kernel, int lanes) {
    const std::int64_t rows = batch * tokens * heads;
    return launch(kernel, {unrolled_blocks_for(rows * lanes), kThreads, 0, stream}, static_cast<const uint4*>(out),
                  static_cast<const uint4*>(out_cotangent), logsumexp, logsumexp_cotangent,
                  reinterpret_cast<float2*>(statistics), Rows(tokens, heads), rows, chunks);
  };
  const auto launch_for = [&](auto element_type) {
    using Element = ElementOf<element_type>;
    const auto launch_lanes = [&](auto lanes) {
      return is_padded ? launch_kernel(natten_jax_delta_reduction<Element, lanes, true>, lanes)
                       : launch_kernel(natten_jax_delta_reduction<Element, lanes, false>, lanes);
    };
    if (chunks <= 8) return launch_lanes(std::integral_constant<int, 8>{});
    if (chunks <= 16) return launch_lanes(std::integral_constant<int, 16>{});
    return launch_lanes(std::integral_constant<int, 32>{});
  };
  return with_half_type(type, cudaErrorInvalidValue, launch_for);
}

cudaError_t launch_delta(ElementType type, const void* out, const void* out_cotangent, const float* logsumexp_cotangent,
                         float* delta, std::int64_t rows, std::int64_t head_dim, cudaStream_t stream) {
  const int chunks = static_cast<int>(head_dim * element_bytes(type) / kChunkBytes);
  const auto launch_kernel = [&](auto kernel, int lanes) {
    return launch(kernel, {blocks_for(rows * lanes), kThreads, 0, stream}, static_cast<const uint4*>(out),
                  static_cast<const uint4*>(out_cotangent), logsumexp_cotangent, delta, rows, chunks);
  };
  const auto launch_for = [&](auto element_type) {
    using Element = ElementOf<element_type>;
    if (chunks <= 8) return launch_kernel(natten_jax_row_delta_reduction<Element, 8>, 8);
    return launch_kernel(natten_jax_row_delta_reduction<Element, 16>, 16);
  };
  return with_constant<ElementType::kFloat32, ElementType::kFloat16, ElementType::kBFloat16>(
      type, cudaErrorInvalidValue, launch_for);
}

cudaError_t launch_convert_gradient(ElementType type, const float* sums, const float* row_statistics,
                                    const Scale& scale, void* gradient, std::int64_t batch, std::int64_t tokens,
                                    std::int64_t heads, std::int64_t all_heads, std::int64_t head_dim, bool overlaps,
                                    cudaStream_t stream) {
  const int chunks = static_cast<int>(head_dim / kElements);
  const std::int64_t all_chunks = batch * tokens * heads * chunks;
  return with_half_type(type, cudaErrorInvalidValue, [&](auto element_type) {
    return launch(natten_jax_convert_gradient<ElementOf<element_type>>,
                  {unrolled_blocks_for(all_chunks), kThreads, 0, stream, overlaps},
                  reinterpret_cast<const float4*>(sums), reinterpret_cast<const float2*>(row_statistics), scale,
                  static_cast<uint4*>(gradient), Rows(tokens, heads), all_chunks, all_heads, chunks,
                  cutlass::FastDivmodU64(chunks));
  });
}

cudaError_t launch_clear(float* elements, std::int64_t number, cudaStream_t stream, const float* row_statistics,
                         std::int64_t rows, std::int64_t row_elements) {
  const bool is_aligned = reinterpret_cast<std::uintptr_t>(elements) % sizeof(float4) == 0;
  const std::int64_t quads = is_aligned ? number / 4 : 0;
  const int blocks = std::min(blocks_for((number + 3) / 4), kClearingBlocks);
  return launch(natten_jax_clear, {blocks, kThreads, 0, stream, true}, elements, quads, number,
                reinterpret_cast<const float2*>(row_statistics), rows, cutlass::FastDivmodU64(row_elements / 4));
}

}  // namespace natten_jax
