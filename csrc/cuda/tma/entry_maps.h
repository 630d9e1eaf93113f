// Makes tensor maps of batch entries whose layouts are smaller than the arrays. With these maps, TMA loads padding as
// zeros, whatever the padding contains, and does not store to padding. A kernel makes the maps, because the layouts are
// in device memory.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/common/device_axis.h"
#include "natten_jax/problem.h"

namespace natten_jax {

inline constexpr int kMostEntryArrays = 7;

struct EntryMaps {
  const std::int32_t* layouts;  ///< [batch, 3, 3]: query origin, query extents, key/value extents.
  int batch;
  int arrays;
  int classes;  ///< Maps per array and entry: 8, one per class of dilation groups; or 1, for the whole layout.
  DeviceAxis axis[kRank];     ///< Axes of the maps' dimensions 1 to 3.
  int dimension[kRank];       ///< For each element of `axis`: index of the dimension in the problem.
  std::uint32_t are_queries;  ///< A bit per array: 1 if its tokens are queries, 0 if they are keys.
  /// One map per array, for an arbitrary class. The maps in `result` differ from these maps only in extents.
  CUtensorMap base_maps[kMostEntryArrays];
  CUtensorMap* result;    ///< [batch, arrays, classes].
  std::int32_t* counter;  ///< Set to zero by the kernel, if not null.
};

/// Launches the kernel that makes the maps. The next kernel may overlap with it. Requires compute capability 9.0.
/// `overlaps`: true if the previous launch is also a launch of this kernel; both launches may then overlap.
cudaError_t launch_entry_maps(const EntryMaps& maps, cudaStream_t stream, bool overlaps = false);

}  // namespace natten_jax
