// Tensor maps of batch entries whose layouts are smaller than the arrays: the copy engine then fills up with zeros what
// lies in the padding, whatever that holds, and stores nothing there. Made on the device, where the layouts are.
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
  int classes;  ///< Classes of dilation groups, 8 as encode_head_map's maps have them, or 1: maps are of whole layouts.
  DeviceAxis axis[kRank];                ///< Dimensions 1 to 3 of the maps.
  int dimension[kRank];                  ///< Which of the problem's each is.
  std::uint32_t are_queries;             ///< A bit for each array that has the queries' tokens.
  CUtensorMap of_all[kMostEntryArrays];  ///< A map of each array, of some class.
  CUtensorMap* result;                   ///< [batch, arrays, classes].
  std::int32_t* counter;                 ///< Set to zero along the way; null: there is none.
};

/// Makes them, and lets the next kernel overlap; compute capability 9.0. One that `overlaps` follows another such
/// launch.
cudaError_t launch_entry_maps(const EntryMaps& maps, cudaStream_t stream, bool overlaps = false);

}  // namespace natten_jax
