// Tensor maps of batch entries whose layouts are smaller than the arrays. TMA then loads padding as zeros, whatever it
// contains, and stores nothing there. The maps are made on the device, where the layouts are.
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
  int classes;  ///< Classes of dilation groups: 8, as in encode_head_map's maps; or 1, for maps of whole layouts.
  DeviceAxis axis[kRank];                ///< Dimensions 1 to 3 of the maps.
  int dimension[kRank];                  ///< Dimension of the problem for each axis.
  std::uint32_t are_queries;             ///< A bit per array, set if it has the queries' tokens.
  CUtensorMap of_all[kMostEntryArrays];  ///< A map of each array, of any class.
  CUtensorMap* result;                   ///< [batch, arrays, classes].
  std::int32_t* counter;                 ///< Set to zero by the kernel, if not null.
};

/// Launches a kernel that makes the maps and lets the next kernel overlap: compute capability 9.0. `overlaps`: the
/// launch follows another such launch and overlaps with it.
cudaError_t launch_entry_maps(const EntryMaps& maps, cudaStream_t stream, bool overlaps = false);

}  // namespace natten_jax
