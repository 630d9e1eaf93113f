// One token dimension of a launch, in the 32-bit numbers that kernels compute with.
#pragma once

#include <cuda_runtime_api.h>
#include <cutlass/fast_math.h>

#include <cstdint>

#include "natten_jax/problem.h"

namespace natten_jax {

/// One token dimension of a launch. Arrays of dimensions begin with the leading dimension. Indices are positions inside
/// a dilation group.
struct DeviceAxis {
  int query_local_extent;  // local query tokens
  int kv_local_extent;     // local key/value tokens
  int query_group_tokens;  // query_local_extent / dilation: minimum number of tokens per group
  int kv_group_tokens;     // kv_local_extent / dilation
  int query_extent;        // global query tokens
  int kv_extent;           // global key/value tokens
  int kernel_size;
  int stride;
  int dilation;
  Ends ends;
  int q_tile;
  int kv_tile;
  int q_tiles;   // query tiles per dilation group
  int kv_tiles;  // key/value tiles per dilation group
  cutlass::FastDivmod by_stride, by_dilation, by_q_tile, by_kv_tile, by_q_tiles, by_kv_tiles;

  // Members that the functions of natten_jax/windows.h use, as in Window.
  CUTLASS_HOST_DEVICE int stride_group(int index) const { return by_stride.divide(index) * stride; }
  CUTLASS_HOST_DEVICE int dilations(int extent) const { return by_dilation.divide(extent); }
  /// If the dimension wraps, maps an index outside it to the index of the same token inside. The index must lie at most
  /// one length outside. If the dimension does not wrap, returns the index.
  CUTLASS_HOST_DEVICE int wrap_index(int index) const {
    if (ends != Ends::kWrap) return index;
    return index < 0 ? index + kv_group_tokens : index >= kv_group_tokens ? index - kv_group_tokens : index;
  }

  CUTLASS_HOST_DEVICE bool is_causal() const { return ends == Ends::kCausal; }
};

/// Position in a tile of its `i`th token. Tokens are numbered with the last dimension fastest. `kByTile` is the member
/// of DeviceAxis that divides by the tile's extent.
template <cutlass::FastDivmod DeviceAxis::* kByTile>
CUTLASS_HOST_DEVICE int3 position_in_tile(const DeviceAxis (&axis)[3], int i) {
  int3 at;
  int line;
  (axis[2].*kByTile)(line, at.z, i);
  (axis[1].*kByTile)(at.x, at.y, line);
  return at;
}

/// Converts an axis to 32-bit numbers. The checks of a problem ensure that the axis's numbers fit.
inline DeviceAxis device_axis(const Axis& axis, std::int64_t q_tile, std::int64_t kv_tile) {
  DeviceAxis result{};
  const std::int64_t dilation = axis.window.dilation;
  const auto narrow = [](std::int64_t value) { return static_cast<int>(value); };
  result.query_local_extent = narrow(axis.query.local_extent);
  result.kv_local_extent = narrow(axis.kv.local_extent);
  result.query_group_tokens = narrow(axis.query.local_extent / dilation);
  result.kv_group_tokens = narrow(axis.kv.local_extent / dilation);
  result.query_extent = narrow(axis.query.extent);
  result.kv_extent = narrow(axis.kv.extent);
  result.kernel_size = narrow(axis.window.kernel_size);
  result.stride = narrow(axis.window.stride);
  result.dilation = narrow(dilation);
  result.ends = axis.window.ends;
  result.q_tile = narrow(q_tile);
  result.kv_tile = narrow(kv_tile);
  const auto tiles_per_group = [&](std::int64_t extent, std::int64_t tile) {
    const std::int64_t group_tokens = (extent + dilation - 1) / dilation;
    return narrow((group_tokens + tile - 1) / tile);
  };
  result.q_tiles = tiles_per_group(axis.query.local_extent, q_tile);
  result.kv_tiles = tiles_per_group(axis.kv.local_extent, kv_tile);
  result.by_stride = cutlass::FastDivmod(result.stride);
  result.by_dilation = cutlass::FastDivmod(result.dilation);
  result.by_q_tile = cutlass::FastDivmod(result.q_tile);
  result.by_kv_tile = cutlass::FastDivmod(result.kv_tile);
  result.by_q_tiles = cutlass::FastDivmod(result.q_tiles);
  result.by_kv_tiles = cutlass::FastDivmod(result.kv_tiles);
  return result;
}

}  // namespace natten_jax
