// Tensor maps of batch entries, as the threads that copy tiles find them: compute capability 9.0.
#pragma once

#include <cuda.h>

#include <cute/config.hpp>

#include "cuda/common/launch.cuh"

namespace natten_jax {

/// Lets the copy engine take a map from memory that an earlier kernel wrote: it may know another one from there.
CUTE_DEVICE void acquire_map(const CUtensorMap* map) {
  asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(map) : "memory");
}

/// The maps of arrays whose tiles are copied: those of all batch entries, or [batch, kArrays, kClasses].
template <int kArrays, int kClasses>
struct MapsOfEntries {
  /// An array's map for a class of dilation groups. Further classes have one map for all entries.
  template <int kMaps>
  CUTE_DEVICE static const CUtensorMap* of(const CUtensorMap* of_entries, const CUtensorMap (&of_all)[kMaps], int array,
                                           int batch, int group_class) {
    if (of_entries == nullptr || group_class >= kClasses) return &of_all[group_class];
    return of_entries + number(array, batch, group_class);
  }

  /// Has a thread, or one that others come after, acquire the map before it is used; `acquired` is the last one's
  /// number, at first a negative one.
  CUTE_DEVICE static void acquire(const CUtensorMap* of_entries, int array, int batch, int group_class, int& acquired) {
    if (of_entries == nullptr || group_class >= kClasses || number(array, batch, group_class) == acquired) return;
    acquired = number(array, batch, group_class);
    wait_for_previous_kernel();  // or one before that, which made it
    acquire_map(of_entries + acquired);
  }

  /// The same without a memory of what was acquired.
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
