// Selects and acquires tensor maps of batch entries, in the threads that issue TMA copies. Requires compute capability
// 9.0.
#pragma once

#include <cuda.h>

#include <cute/config.hpp>

#include "cuda/common/launch.cuh"

namespace natten_jax {

/// Acquires a tensor map that an earlier kernel wrote. The fence makes TMA drop its cached copy of the map.
CUTE_DEVICE void acquire_map(const CUtensorMap* map) {
  asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(map) : "memory");
}

/// Functions for the tensor maps of `kArrays` arrays. `entry_maps` has the separate maps of batch entries, [batch,
/// kArrays, kClasses]. It is null if all batch entries share their maps.
template <int kArrays, int kClasses>
struct MapsOfEntries {
  /// Returns an array's map for a class of dilation groups. `shared_maps` has the array's shared maps by class. Batch
  /// entries never have separate maps for classes from `kClasses` on.
  template <int kMaps>
  CUTE_DEVICE static const CUtensorMap* select_map(const CUtensorMap* entry_maps,
                                                   const CUtensorMap (&shared_maps)[kMaps], int array, int batch,
                                                   int group_class) {
    if (entry_maps == nullptr || group_class >= kClasses) return &shared_maps[group_class];
    return entry_maps + number(array, batch, group_class);
  }

  /// Acquires a map of a batch entry, unless it is the map that this thread acquired most recently. A thread has to
  /// call this function before it uses the map, or before it synchronizes with the threads that use the map.
  /// `acquired`: index of the most recently acquired map; initially negative.
  CUTE_DEVICE static void acquire(const CUtensorMap* entry_maps, int array, int batch, int group_class, int& acquired) {
    if (entry_maps == nullptr || group_class >= kClasses || number(array, batch, group_class) == acquired) return;
    acquired = number(array, batch, group_class);
    wait_for_previous_kernel();  // the previous kernel, or a kernel before it, made the map
    acquire_map(entry_maps + acquired);
  }

  /// Acquires a map of a batch entry, even if this thread has acquired the same map before.
  CUTE_DEVICE static void acquire(const CUtensorMap* entry_maps, int array, int batch, int group_class) {
    int none = -1;
    acquire(entry_maps, array, batch, group_class, none);
  }

 private:
  CUTE_DEVICE static int number(int array, int batch, int group_class) {
    return (batch * kArrays + array) * kClasses + group_class;
  }
};

}  // namespace natten_jax
