// One token dimension of a launch, in the 32-bit numbers that kernels compute with.
#pragma once

#include <cuda_runtime_api.h>
#include <cutlass/fast_math.h>

#include <cstdint>

#include "natten_jax/problem.h"

namespace natten_jax {

/// One token dimension, leading dimensions first. Indices are positions inside a dilation group.
struct Axis {
  int query_extent;        // local query tokens
  int kv_extent;           // local key/value tokens
  int query_group_tokens;  // query_extent / dilation: a group without remainder token
  int kv_group_tokens;     // kv_extent / dilation
  int query_layout;        // global query tokens
  int kv_layout;           // global key/value tokens
  int kernel_size;
  int stride;
  int dilation;
  int is_causal;
  int q_tile;
  int kv_tile;
  int q_tiles;   // query tiles per dilation group
  int kv_tiles;  // key/value tiles per dilation group
  cutlass::FastDivmod by_stride, by_dilation, by_q_tile, by_kv_tile, by_q_tiles, by_kv_tiles;
};

/// Checked problems fit into 32 bits.
inline Axis describe_axis(const Dimension& dim, std::int64_t q_tile, std::int64_t kv_tile) {
  Axis axis{};
  const auto narrow = [](std::int64_t value) { return static_cast<int>(value); };
  axis.query_extent = narrow(dim.query.extent);
  axis.kv_extent = narrow(dim.kv.extent);
  axis.query_group_tokens = narrow(dim.query.extent / dim.dilation);
  axis.kv_group_tokens = narrow(dim.kv.extent / dim.dilation);
  axis.query_layout = narrow(dim.query.layout);
  axis.kv_layout = narrow(dim.kv.layout);
  axis.kernel_size = narrow(dim.kernel_size);
  axis.stride = narrow(dim.stride);
  axis.dilation = narrow(dim.dilation);
  axis.is_causal = dim.is_causal;
  axis.q_tile = narrow(q_tile);
  axis.kv_tile = narrow(kv_tile);
  const auto tiles_per_group = [&](std::int64_t extent, std::int64_t tile) {
    const std::int64_t group_tokens = (extent + dim.dilation - 1) / dim.dilation;
    return narrow((group_tokens + tile - 1) / tile);
  };
  axis.q_tiles = tiles_per_group(dim.query.extent, q_tile);
  axis.kv_tiles = tiles_per_group(dim.kv.extent, kv_tile);
  axis.by_stride = cutlass::FastDivmod(axis.stride);
  axis.by_dilation = cutlass::FastDivmod(axis.dilation);
  axis.by_q_tile = cutlass::FastDivmod(axis.q_tile);
  axis.by_kv_tile = cutlass::FastDivmod(axis.kv_tile);
  axis.by_q_tiles = cutlass::FastDivmod(axis.q_tiles);
  axis.by_kv_tiles = cutlass::FastDivmod(axis.kv_tiles);
  return axis;
}

}  // namespace natten_jax
