// Benchmark kernels (rungs). They use the matrix products and the shared-memory layout of the portable kernels.
//
// A CTA computes a tile of queries, and each of its warps computes 16 or 32 of these queries. The CTA reads all keys
// that its queries attend to, one tile at a time.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <tuple>

#include "bench/fmha_ladder.h"
#include "cuda/common/constants.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/row_sums.cuh"
#include "cuda/warp/cp_async.cuh"
#include "cuda/warp/mma.cuh"

namespace natten_jax::bench {

constexpr float kLog2e = 1.4426950408889634f;

/// Numbers of queries and keys per tile. The compiler limits the registers of a thread such that `kOccupancy` CTAs fit
/// on an SM.
template <int kWarps, int kRowBlocks_, int kKeys_, int kOccupancy_>
struct Tiles {
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRowBlocks = kRowBlocks_;  // per warp; a row block has 16 queries
  static constexpr int kQueries = 16 * kRowBlocks * kWarps;
  static constexpr int kKeys = kKeys_;
  static constexpr int kOccupancy = kOccupancy_;
};
/// By TileSizes.
using AllTiles = std::tuple<Tiles<4, 1, 64, 2>, Tiles<4, 2, 64, 2>, Tiles<8, 1, 128, 1>>;

template <class Element_, int kHeadDim_, Rung kRung_, class Tiles_>
struct Traits : Tiles_ {
  using Element = Element_;
  using Product = HalfProduct<Element>;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr Rung kRung = kRung_;
  static constexpr bool kHasMath = kRung != Rung::kBasic, kHasMemory = kRung == Rung::kMemory;
  static constexpr int kStages = kHasMemory ? 2 : 1;
  using Tile = SharedTile<kHeadDim * 2>;
  using KeyTile = std::conditional_t<kHasMemory, Tile, SharedTile<Tiles_::kKeys * 2>>;  // [key][dim] or [dim][key]

  struct SharedStorage {
    alignas(128) char q[Tiles_::kQueries * Tile::kRowBytes];
    alignas(128) char k[kStages][Tiles_::kKeys * Tile::kRowBytes];
    alignas(128) char v[kStages][Tiles_::kKeys * Tile::kRowBytes];
  };
};

/// Rows of one head in global memory. Loads of rows past the last token return zeros.
template <class Tile, int kThreads>
struct Rows {
  const char* base;
  std::int64_t pitch;  // in bytes
  int tokens;

  /// Divides `kCount` rows into chunks of 16 bytes, distributes these over the CTA's threads, and calls `copy(row,
  /// chunk, source, is_inside)` for each chunk of this thread.
  template <int kCount, class Copy>
  CUTE_DEVICE void share(int first, Copy copy) const {
    CUTE_UNROLL
    for (int i = threadIdx.x; i < kCount * Tile::kChunks; i += kThreads) {
      const int row = i / Tile::kChunks, chunk = i % Tile::kChunks;
      const bool is_inside = first + row < tokens;
      copy(row, chunk, base + (is_inside ? first + row : 0) * pitch + chunk * 16, is_inside);
    }
  }
  template <int kCount>
  CUTE_DEVICE void load_async(std::uint32_t tile, int first) const {
    share<kCount>(first, [&](int row, int chunk, const char* source, bool is_inside) {
      copy_async(tile + Tile::offset(row, chunk), source, is_inside);
    });
  }
  template <int kCount>
  CUTE_DEVICE void load(char* tile, int first) const {
    share<kCount>(first, [&](int row, int chunk, const char* source, bool is_inside) {
      const uint4 data = is_inside ? *reinterpret_cast<const uint4*>(source) : make_uint4(0, 0, 0, 0);
      *reinterpret_cast<uint4*>(tile + Tile::offset(row, chunk)) = data;
    });
  }
  template <class Transposed, int kCount>
  CUTE_DEVICE void load_transposed(char* tile, int first) const {
    share<kCount>(first, [&](int row, int chunk, const char* source, bool is_inside) {
      const uint4 data = is_inside ? *reinterpret_cast<const uint4*>(source) : make_uint4(0, 0, 0, 0);
      const std::uint16_t* elements = reinterpret_cast<const std::uint16_t*>(&data);
      CUTE_UNROLL
      for (int e = 0; e < 8; ++e) {
        *reinterpret_cast<std::uint16_t*>(tile + Transposed::offset(8 * chunk + e, row / 8) + row % 8 * 2) =
            elements[e];
      }
    });
  }
};

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kOccupancy)
    natten_jax_bench_fmha_forward(const FmhaParams p) {
  using Element = typename Traits::Element;
  using Product = typename Traits::Product;
  using Tile = typename Traits::Tile;
  using HeadRows = Rows<Tile, Traits::kThreads>;
  constexpr int kHeadDim = Traits::kHeadDim, kRowBlocks = Traits::kRowBlocks;
  constexpr int kQueries = Traits::kQueries, kKeys = Traits::kKeys;
  extern __shared__ __align__(128) char raw[];
  auto& shared = *reinterpret_cast<typename Traits::SharedStorage*>(raw);
  const int lane4 = threadIdx.x % 4, warp_row = threadIdx.x / 32 * 16 * kRowBlocks;
  const int first_query = blockIdx.x * kQueries, head = blockIdx.y, batch = blockIdx.z;
  const std::int64_t pitch = static_cast<std::int64_t>(p.heads) * kHeadDim * 2;
  const std::int64_t start = batch * static_cast<std::int64_t>(p.tokens) * pitch + head * kHeadDim * 2;
  const auto rows = [&](const void* array) {
    return HeadRows{static_cast<const char*>(array) + start, pitch, p.tokens};
  };
  const HeadRows queries = rows(p.query), keys = rows(p.key), values = rows(p.value);
  const int visible_tokens = p.is_causal ? min(first_query + kQueries, p.tokens) : p.tokens;
  const int tiles = (visible_tokens + kKeys - 1) / kKeys;

  const auto load_async = [&](int tile) {
    keys.template load_async<kKeys>(shared_address(shared.k[tile % 2]), tile * kKeys);
    values.template load_async<kKeys>(shared_address(shared.v[tile % 2]), tile * kKeys);
    commit_copies();
  };
  if constexpr (Traits::kHasMemory) {
    queries.template load_async<kQueries>(shared_address(shared.q), first_query);
    load_async(0);
  } else {
    queries.template load<kQueries>(shared.q, first_query);
  }

  const typename Product::template ReadA<Tile> read_q(shared_address(shared.q), warp_row);
  // Scale of the logits. kBasic multiplies each logit by the scale before it computes the maximum. For later rungs, the
  // scale includes log2(e), and one instruction multiplies a logit and subtracts the maximum.
  const float exponent_scale = Traits::kHasMath ? p.scale * kLog2e : p.scale;
  const auto exponential = [](float x) __attribute__((always_inline)) {
    if constexpr (Traits::kHasMath) {
      return fast_exp2(x);
    } else {
      return expf(x);
    }
  };
  float o[kRowBlocks][kHeadDim / 8][4] = {};
  float row_max[kRowBlocks][2], row_sum[kRowBlocks][2] = {};
  CUTE_UNROLL
  for (int i = 0; i < 2 * kRowBlocks; ++i) row_max[i / 2][i % 2] = -INFINITY;

  for (int tile = 0; tile < tiles; ++tile) {
    const int stage = Traits::kHasMemory ? tile % 2 : 0;
    if constexpr (Traits::kHasMemory) {
      wait_copies<0>();
      __syncthreads();  // this tile is loaded, and all warps have read the previous tile
      if (tile + 1 < tiles) load_async(tile + 1);
    } else {
      __syncthreads();
      keys.template load_transposed<typename Traits::KeyTile, kKeys>(shared.k[0], tile * kKeys);
      values.template load<kKeys>(shared.v[0], tile * kKeys);
      __syncthreads();
    }
    const std::uint32_t k = shared_address(shared.k[stage]), v = shared_address(shared.v[stage]);

    float s[kRowBlocks][kKeys / 8][4] = {};
    using ReadK = std::conditional_t<Traits::kHasMemory, typename Product::template ReadB<typename Traits::KeyTile>,
                                     typename Product::template ReadTransposedB<typename Traits::KeyTile>>;
    const ReadK read_k(k, 0);
    accumulate<Product, kRowBlocks, kKeys / 16, kHeadDim / Product::kStep>(
        s, [&](auto& a, int m, int step) __attribute__((always_inline)) { read_q(a, 16 * m, step); },
        [&](auto& b, int n, int step) __attribute__((always_inline)) { read_k(b, 16 * n, step); });

    const bool is_masked = (tile + 1) * kKeys > (p.is_causal ? first_query + 1 : p.tokens);
    CUTE_UNROLL
    for (int i = 0; i < 2 * kRowBlocks; ++i) {
      const int m = i / 2, r = i % 2 * 2;
      const int query = first_query + warp_row + 16 * m + threadIdx.x % 32 / 4 + 8 * (i % 2);
      float highest = row_max[m][i % 2];
      CUTE_UNROLL
      for (int e = 0; e < kKeys / 4; ++e) {
        float& logit = s[m][e / 2][r + e % 2];
        if constexpr (!Traits::kHasMath) logit *= exponent_scale;
        if (is_masked) {
          const int key = tile * kKeys + e / 2 * 8 + 2 * lane4 + e % 2;
          if (key >= p.tokens || (p.is_causal && key > query)) logit = -INFINITY;
        }
        highest = fmaxf(highest, Traits::kHasMath ? logit * exponent_scale : logit);
      }
      highest = largest_of_row(highest);
      const float rescale = exponential(row_max[m][i % 2] - highest);
      row_max[m][i % 2] = highest;
      float sum = 0.f;
      CUTE_UNROLL
      for (int e = 0; e < kKeys / 4; ++e) {
        float& weight = s[m][e / 2][r + e % 2];
        weight = exponential(Traits::kHasMath ? weight * exponent_scale - highest : weight - highest);
        sum += weight;
      }
      row_sum[m][i % 2] = row_sum[m][i % 2] * rescale + sum;
      CUTE_UNROLL
      for (int e = 0; e < kHeadDim / 4; ++e) o[m][e / 2][r + e % 2] *= rescale;
    }
    const typename Product::template ReadTransposedB<Tile> read_v(v, 0);
    accumulate<Product, kRowBlocks, kHeadDim / 16, kKeys / Product::kStep>(
        o, [&](auto& a, int m, int step) __attribute__((always_inline)) { a = Product::operand(s[m], step); },
        [&](auto& b, int n, int step) __attribute__((always_inline)) { read_v(b, 16 * n, step); });
  }

  CUTE_UNROLL
  for (int i = 0; i < 2 * kRowBlocks; ++i) {
    const int query = first_query + warp_row + 16 * (i / 2) + threadIdx.x % 32 / 4 + 8 * (i % 2);
    const float sum = sum_of_row(row_sum[i / 2][i % 2]);
    if (query >= p.tokens) continue;
    char* row = static_cast<char*>(p.out) + start + query * pitch;
    CUTE_UNROLL
    for (int n = 0; n < kHeadDim / 8; ++n) {
      const float* pair = &o[i / 2][n][i % 2 * 2];
      const float low = Traits::kHasMath ? __fdividef(pair[0], sum) : pair[0] / sum;
      const float high = Traits::kHasMath ? __fdividef(pair[1], sum) : pair[1] / sum;
      *reinterpret_cast<std::uint32_t*>(row + 16 * n + 4 * lane4) = pack<Element>(low, high);
    }
  }
}

template <class Traits>
cudaError_t launch_rung(const FmhaParams& params, cudaStream_t stream) {
  const dim3 grid((params.tokens + Traits::kQueries - 1) / Traits::kQueries, params.heads, params.batch);
  return launch_form<Traits>(natten_jax_bench_fmha_forward<Traits>, grid, stream, params);
}

template <ElementType kType>
cudaError_t launch_fmha(Rung rung, TileSizes tiles, int head_dim, const FmhaParams& params, cudaStream_t stream) {
  constexpr cudaError_t kNone = cudaErrorInvalidValue;
  return with_constant<64, 128>(head_dim, kNone, [&](auto width) {
    return with_constant<TileSizes::k64x64, TileSizes::k128x64, TileSizes::k128x128>(tiles, kNone, [&](auto sizes) {
      return with_constant<Rung::kBasic, Rung::kMath, Rung::kMemory>(rung, kNone, [&](auto rung_constant) {
        using Tiles = std::tuple_element_t<static_cast<int>(sizes()), AllTiles>;
        return launch_rung<Traits<ElementOf<kType>, width, rung_constant, Tiles>>(params, stream);
      });
    });
  });
}

}  // namespace natten_jax::bench
