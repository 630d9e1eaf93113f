// The gradient of a relative bias: sums of the records of tiles, in their order.
#pragma once

#include <climits>

#include "cuda/common/axis_plan.cuh"
#include "cuda/small/bias_table.h"
#include "cuda/small/params.h"

namespace natten_jax::small {

/// Whether a tile has queries; its number is the one of TilePlan.
CUTE_DEVICE bool has_queries(const TableParams& p, int tile) {
  bool result = true;
  CUTE_UNROLL
  for (int d = kRank - 1; d >= 0; --d) {
    const DeviceAxis& axis = p.axis[d];
    int of_dimension, residue, index;
    p.by_tiles[d](tile, of_dimension, tile);
    axis.by_q_tiles(residue, index, of_dimension);
    result &= index * axis.q_tile < group_length(axis, axis.query_local_extent, residue);
  }
  return result;
}

/// A CTA adds up a part of the tiles of a batch entry and head; a thread has every few of the table's entries.
__global__ void __launch_bounds__(1024) natten_jax_small_table_gradient(const __grid_constant__ TableParams p) {
  __shared__ int least_offset[kTilesOfSum][kRank];
  const std::int64_t item = blockIdx.x, numbers = p.record + kRecordHeader;
  const int first = blockIdx.y * kTilesOfSum, count = min(kTilesOfSum, p.tiles - first);
  const float* records = p.records + (item * p.tiles + first) * numbers;
  if (threadIdx.x < count) {
    const int4 header = *reinterpret_cast<const int4*>(records + threadIdx.x * numbers + p.record);
    // A tile without queries has written nothing: no entry is among those of its record.
    const bool is_written = has_queries(p, first + threadIdx.x);
    least_offset[threadIdx.x][0] = is_written ? header.x : 1 << 20;
    least_offset[threadIdx.x][1] = header.y;
    least_offset[threadIdx.x][2] = header.z;
  }
  __syncthreads();
  float* sums = p.sums + (std::int64_t{blockIdx.y} * gridDim.x + item) * p.entries;
  for (int entry = threadIdx.x; entry < p.entries; entry += blockDim.x) {
    int offset[kRank];
    const bool is_offset = p.box.split(entry, offset);
    float sum = 0.f;
#pragma unroll 8
    for (int tile = 0; tile < count; ++tile) {
      int place;
      const bool is_there = p.box.find(offset, least_offset[tile], place) & is_offset;
      if (is_there) sum += records[tile * numbers + place];
    }
    sums[entry] = sum;
  }
}

}  // namespace natten_jax::small
