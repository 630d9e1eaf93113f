#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <type_traits>

#include "cuda/common/gradient_passes.h"

namespace natten_jax {
namespace {

constexpr int kThreads = 256;
constexpr int kElements = 8;  // of 16 bits that a thread moves at once
constexpr int kChunkBytes = 16;
constexpr int kMostBlocks = 1 << 16;

__device__ float2 to_floats(__half2 pair) {
  return __half22float2(pair);
}
__device__ float2 to_floats(__nv_bfloat162 pair) {
  return __bfloat1622float2(pair);
}
__device__ float2 to_floats(float2 pair) {
  return pair;
}
template <class Pair>
__device__ Pair from_floats(float x, float y) {
  if constexpr (std::is_same_v<Pair, __half2>) {
    return __floats2half2_rn(x, y);
  } else {
    return __floats2bfloat162_rn(x, y);
  }
}

/// The sum of the products of two chunks' elements; a `Pair` is two neighboring ones.
template <class Pair>
__device__ float dot(uint4 a, uint4 b) {
  const auto* of_a = reinterpret_cast<const Pair*>(&a);
  const auto* of_b = reinterpret_cast<const Pair*>(&b);
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(uint4) / sizeof(Pair)); ++i) {
    const float2 x = to_floats(of_a[i]), y = to_floats(of_b[i]);
    sum += x.x * y.x + x.y * y.y;
  }
  return sum;
}

/// The sum over the `kLanes` neighboring threads that share a row.
template <int kLanes>
__device__ float sum_of_row(float sum) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  }
  return sum;
}

/// `kLanes` neighboring threads share a row, that is a query and head.
template <class Pair, int kLanes>
__global__ void __launch_bounds__(kThreads)
    natten_jax_delta_reduction(const uint4* out, const uint4* out_cotangent, const float* logsumexp,
                               const float* logsumexp_cotangent, float2* statistics, std::int64_t tokens, int heads,
                               int chunks) {
  constexpr float kLog2e = 1.4426950408889634f;
  const int lane = threadIdx.x % kLanes;
  const std::int64_t batch = blockIdx.y, rows = tokens * heads;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * (kThreads / kLanes);
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * (kThreads / kLanes) + threadIdx.x / kLanes;
  // All threads of a warp take part in its shuffles.
  for (std::int64_t row = first; row - threadIdx.x % 32 / kLanes < rows; row += step) {
    float sum = 0.f;
    const std::int64_t in_all = batch * rows + row;
    if (row < rows && lane < chunks) {
      sum = dot<Pair>(out[in_all * chunks + lane], out_cotangent[in_all * chunks + lane]);
    }
    sum = sum_of_row<kLanes>(sum);
    if (row < rows && lane == 0) {
      const std::int64_t token = row / heads, head = row - token * heads;
      statistics[(batch * heads + head) * tokens + token] =
          make_float2(logsumexp[in_all] * kLog2e, sum - logsumexp_cotangent[in_all]);
    }
  }
}

/// As natten_jax_delta_reduction, with results in the order of the rows and without the logsumexp.
template <class Pair, int kLanes>
__global__ void __launch_bounds__(kThreads)
    natten_jax_row_delta_reduction(const uint4* out, const uint4* out_cotangent, const float* logsumexp_cotangent,
                                   float* delta, std::int64_t rows, int chunks) {
  const int lane = threadIdx.x % kLanes;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * (kThreads / kLanes);
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * (kThreads / kLanes) + threadIdx.x / kLanes;
  // All threads of a warp take part in its shuffles.
  for (std::int64_t row = first; row - threadIdx.x % 32 / kLanes < rows; row += step) {
    float sum = 0.f;
    for (int chunk = lane; row < rows && chunk < chunks; chunk += kLanes) {
      sum += dot<Pair>(out[row * chunks + chunk], out_cotangent[row * chunks + chunk]);
    }
    sum = sum_of_row<kLanes>(sum);
    if (row < rows && lane == 0) delta[row] = sum - logsumexp_cotangent[row];
  }
}

template <class Pair>
__global__ void __launch_bounds__(kThreads)
    natten_jax_convert_gradient(const float4* sums, float scale, uint4* gradient, std::int64_t tokens, int heads,
                                int all_heads, int chunks) {
  // Chunks of a token's heads, whose order differs from the sums'.
  const int of_token = heads * chunks;
  const std::int64_t batch = blockIdx.y;
  const std::int64_t all = tokens * of_token;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < all;
       i += static_cast<std::int64_t>(gridDim.x) * kThreads) {
    const std::int64_t token = i / of_token;
    const int in_token = static_cast<int>(i - token * of_token);
    const int head = in_token / chunks, chunk = in_token - head * chunks;
    const std::int64_t from = ((batch * heads + head) * tokens + token) * chunks + chunk;
    const float4 low = sums[2 * from], high = sums[2 * from + 1];
    uint4 result;
    auto* pairs = reinterpret_cast<Pair*>(&result);
    pairs[0] = from_floats<Pair>(low.x * scale, low.y * scale);
    pairs[1] = from_floats<Pair>(low.z * scale, low.w * scale);
    pairs[2] = from_floats<Pair>(high.x * scale, high.y * scale);
    pairs[3] = from_floats<Pair>(high.z * scale, high.w * scale);
    gradient[((batch * tokens + token) * all_heads + head) * chunks + chunk] = result;
  }
}

int blocks_for(std::int64_t threads) {
  return static_cast<int>(std::min<std::int64_t>((threads + kThreads - 1) / kThreads, kMostBlocks));
}

}  // namespace

cudaError_t launch_statistics(bool is_bfloat16, const void* out, const void* out_cotangent, const float* logsumexp,
                              const float* logsumexp_cotangent, float* statistics, std::int64_t batch,
                              std::int64_t tokens, std::int64_t heads, std::int64_t head_dim, cudaStream_t stream) {
  const int chunks = static_cast<int>(head_dim / kElements);
  const auto launch = [&](auto kernel, int lanes) {
    const dim3 grid(blocks_for(tokens * heads * lanes), static_cast<unsigned>(batch));
    kernel<<<grid, kThreads, 0, stream>>>(static_cast<const uint4*>(out), static_cast<const uint4*>(out_cotangent),
                                          logsumexp, logsumexp_cotangent, reinterpret_cast<float2*>(statistics), tokens,
                                          static_cast<int>(heads), chunks);
    return cudaGetLastError();
  };
  const auto launch_for = [&](auto pair) {
    using Pair = decltype(pair);
    if (chunks <= 8) return launch(natten_jax_delta_reduction<Pair, 8>, 8);
    if (chunks <= 16) return launch(natten_jax_delta_reduction<Pair, 16>, 16);
    return launch(natten_jax_delta_reduction<Pair, 32>, 32);
  };
  return is_bfloat16 ? launch_for(__nv_bfloat162{}) : launch_for(__half2{});
}

cudaError_t launch_delta(ElementType type, const void* out, const void* out_cotangent, const float* logsumexp_cotangent,
                         float* delta, std::int64_t rows, std::int64_t head_dim, cudaStream_t stream) {
  const int chunks = static_cast<int>(head_dim * (type == ElementType::kFloat32 ? 4 : 2) / kChunkBytes);
  const auto launch = [&](auto kernel, int lanes) {
    kernel<<<blocks_for(rows * lanes), kThreads, 0, stream>>>(static_cast<const uint4*>(out),
                                                              static_cast<const uint4*>(out_cotangent),
                                                              logsumexp_cotangent, delta, rows, chunks);
    return cudaGetLastError();
  };
  const auto launch_for = [&](auto pair) {
    using Pair = decltype(pair);
    if (chunks <= 8) return launch(natten_jax_row_delta_reduction<Pair, 8>, 8);
    return launch(natten_jax_row_delta_reduction<Pair, 16>, 16);
  };
  return type == ElementType::kFloat32    ? launch_for(float2{})
         : type == ElementType::kBFloat16 ? launch_for(__nv_bfloat162{})
                                          : launch_for(__half2{});
}

cudaError_t launch_convert_gradient(bool is_bfloat16, const float* sums, float scale, void* gradient,
                                    std::int64_t batch, std::int64_t tokens, std::int64_t heads, std::int64_t all_heads,
                                    std::int64_t head_dim, cudaStream_t stream) {
  const int chunks = static_cast<int>(head_dim / kElements);
  const dim3 grid(blocks_for(tokens * heads * chunks), static_cast<unsigned>(batch));
  const auto launch = [&](auto kernel) {
    kernel<<<grid, kThreads, 0, stream>>>(reinterpret_cast<const float4*>(sums), scale, static_cast<uint4*>(gradient),
                                          tokens, static_cast<int>(heads), static_cast<int>(all_heads), chunks);
    return cudaGetLastError();
  };
  return is_bfloat16 ? launch(natten_jax_convert_gradient<__nv_bfloat162>)
                     : launch(natten_jax_convert_gradient<__half2>);
}

}  // namespace natten_jax
