// Tensor maps of batch entries, for the threads that copy tiles: compute capability 9.0.
#pragma once

#include <cuda.h>

#include <cute/config.hpp>

#include "cuda/common/launch.cuh"

namespace natten_jax {

/// fence.proxy.tensormap acquire of a map that an earlier kernel wrote: drops the TMA unit's cached descriptor.
CUTE_DEVICE void acquire_map(const CUtensorMap* map) {
  asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(map) : "memory");
}

/// Maps of the arrays whose tiles are copied: shared by all batch entries, or [batch, kArrays, kClasses].
template <int kArrays, int kClasses>
struct MapsOfEntries {
  /// An array's map for a class of dilation groups. Classes from `kClasses` on share a map for all entries.
  template <int kMaps>
  CUTE_DEVICE static const CUtensorMap* of(const CUtensorMap* of_entries, const CUtensorMap (&of_all)[kMaps], int array,
                                           int batch, int group_class) {
    if (of_entries == nullptr || group_class >= kClasses) return &of_all[group_class];
    return of_entries + number(array, batch, group_class);
  }

  /// Acquires the map before its first use by this thread, or by threads that are synchronised after it. `acquired`:
  /// number of the map acquired last; initially negative.
  CUTE_DEVICE static void acquire(const CUtensorMap* of_entries, int array, int batch, int group_class, int& acquired) {
    if (of_entries == nullptr || group_class >= kClasses || number(array, batch, group_class) == acquired) return;
    acquired = number(array, batch, group_class);
    wait_for_previous_kernel();  // or an earlier kernel, which made the map
    acquire_map(of_entries + acquired);
  }

  /// Acquires the map without remembering it.
  CUTE_DEVICE static void acquire(const CUtensorMap* of_entries, int array, int batch, int group_class) {
    int none = -1;
    acquire(of_entries, array, batch, group_class, none);
  }

 private:
  CUTE_DEVICE static int number(int array, int batch, int group_class) {
    return (batch * kArrays + array) * kClasses + group_class;
  }
};

}  // namespace natten_jax
