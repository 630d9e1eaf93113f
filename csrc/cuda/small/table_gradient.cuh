// Gradient of a relative bias: adds up the records of tiles (bias_table.h) in a fixed order.
#pragma once

#include <cutlass/fast_math.h>

#include "cuda/common/axis_plan.cuh"
#include "cuda/small/bias_table.h"
#include "cuda/small/params.h"

namespace natten_jax::small {

/// Maximum number of threads per CTA.
inline constexpr int kTableThreads = 256;

/// Returns the number of bytes of shared memory for sums of runs of tiles. A CTA adds up as many runs at a time as the
/// memory has room for, and at least one.
constexpr int bytes_of_runs(int record) {
  constexpr int kMostRuns = 12, kMostBytes = 32 * 1024;
  const int run = static_cast<int>(sizeof(float)) * record, runs = kMostBytes / run;
  return run * (runs < 1 ? 1 : runs > kMostRuns ? kMostRuns : runs);
}

/// True if the tile with index `tile` (TilePlan::number) has queries.
CUTE_DEVICE bool has_queries(const TableParams& p, int tile) {
  bool result = true;
  CUTE_UNROLL
  for (int d = kRank - 1; d >= 0; --d) {
    const DeviceAxis& axis = p.axis[d];
    int dimension_tile, residue, index;
    p.by_tiles[d](tile, dimension_tile, tile);
    axis.by_q_tiles(residue, index, dimension_tile);
    result &= index * axis.q_tile < group_length(axis, axis.query_local_extent, residue);
  }
  return result;
}

/// Adds up the records of tiles. A CTA handles some of the tiles of a batch entry and head. A run is a sequence of
/// consecutive tiles whose records begin at the same offsets, as the records of most tiles of a line do. The records of
/// a run are added up element by element. Then the sums are added to the table's entries, whose positions have to be
/// computed only once per run.
__global__ void __launch_bounds__(kTableThreads)
    natten_jax_small_table_gradient(const __grid_constant__ TableParams p) {
  static_assert(kTilesOfSum == 32, "a lane of a warp each, and a bit of a word");
  // Number of tiles from whose records a thread loads at a time. It loads four numbers of each record. The first loads
  // overlap with the loads of the headers.
  constexpr int kAtOnce = 8;
  constexpr unsigned kAll = 0xffffffff;
  extern __shared__ float4 runs[];
  // For each tile: its smallest offsets, and the distance in numbers from the table's first entry to the entry of the
  // record's first number.
  __shared__ int4 least_offset[kTilesOfSum];
  const std::int64_t item = blockIdx.x, numbers = p.record + kRecordHeader;
  const int first_tile = blockIdx.y * kTilesOfSum, count = min(kTilesOfSum, p.tiles - first_tile);
  const float* const records = p.records + (item * p.tiles + first_tile) * numbers;
  const int lane = threadIdx.x % 32, lane_tile = min(lane, count - 1);
  const int4 header = *reinterpret_cast<const int4*>(records + lane_tile * numbers + p.record);
  // A tile without queries has not written a record. Its smallest offset is set to a value that matches no entry.
  const bool is_written = has_queries(p, first_tile + lane_tile);
  const unsigned written = __ballot_sync(kAll, is_written);
  const int chunks = p.record / kEntriesOfChunk, next_tile = static_cast<int>(numbers) / kEntriesOfChunk;
  const float4* const records_in_chunks = reinterpret_cast<const float4*>(records);
  const auto load = [&](float4(&next)[kAtOnce], int tile, int chunk) {
    const float4* const from = records_in_chunks + tile * next_tile + chunk;
    CUTE_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      const bool is_there = tile + i < count && chunk < chunks && (written >> (tile + i) & 1) != 0;
      next[i] = is_there ? from[i * next_tile] : make_float4(0.f, 0.f, 0.f, 0.f);
    }
  };
  const int thread_chunk = threadIdx.x,
            most_runs = bytes_of_runs(p.record) / static_cast<int>(sizeof(float)) / p.record;
  float4 next[kAtOnce];
  load(next, 0, thread_chunk);
  const int least[kRank] = {is_written ? header.x : 1 << 20, header.y, header.z};
  bool begins_one = lane == 0;
  CUTE_UNROLL
  for (int d = 0; d < kRank; ++d) {
    begins_one |= __shfl_up_sync(kAll, least[d], 1) != least[d];
  }
  if (threadIdx.x < kTilesOfSum) {
    least_offset[lane] = make_int4(least[0], least[1], least[2],
                                   least[0] * p.box.pitch[0] + least[1] * p.box.pitch[1] + least[2] * p.box.pitch[2]);
  }
  const unsigned begins = __ballot_sync(kAll, begins_one);
  float* const sums = p.sums + (std::int64_t{blockIdx.y} * gridDim.x + item) * p.entries;
  for (int first = 0, end = 0; first < count; first = end) {
    // Find the end of the last run whose sums still fit in shared memory.
    for (int all = 0; end < count && (all += begins >> end & 1) <= most_runs; ++end) {
    }
    for (int chunk = thread_chunk; chunk < chunks; chunk += blockDim.x) {
      float4* to = runs + chunk;
      float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
      CUTE_NO_UNROLL
      for (int tile = first; tile < end; tile += kAtOnce) {
        if (tile > 0 || chunk != thread_chunk) load(next, tile, chunk);
        CUTE_UNROLL
        for (int i = 0; i < kAtOnce; ++i) {
          if (tile + i >= end) break;
          if (tile + i > first && (begins >> (tile + i) & 1) != 0) {
            *to = sum;
            to += chunks;
            sum = make_float4(0.f, 0.f, 0.f, 0.f);
          }
          sum = make_float4(sum.x + next[i].x, sum.y + next[i].y, sum.z + next[i].z, sum.w + next[i].w);
        }
      }
      *to = sum;
    }
    __syncthreads();
    const unsigned begins_here = begins >> first << first & (kAll >> (kTilesOfSum - end));
    for (int entry = threadIdx.x; entry < p.entries; entry += blockDim.x) {
      int offset[kRank];
      const bool is_offset = p.box.split(entry, offset);
      const int entry_index = offset[0] * p.box.pitch[0] + offset[1] * p.box.pitch[1] + offset[2] * p.box.pitch[2];
      float sum = first == 0 ? 0.f : sums[entry];
      const float* run = reinterpret_cast<const float*>(runs);
      for (unsigned rest = begins_here; rest != 0; rest &= rest - 1) {
        const int4 least = least_offset[__ffs(rest) - 1];
        const auto is_within = [&](int d, int least) {
          return static_cast<unsigned>(offset[d] - least) < static_cast<unsigned>(p.box.extent[d]);
        };
        if (is_within(0, least.x) & is_within(1, least.y) & is_within(2, least.z) & is_offset) {
          sum += run[entry_index - least.w];
        }
        run += p.record;
      }
      sums[entry] = sum;
    }
    __syncthreads();
  }
}

}  // namespace natten_jax::small
