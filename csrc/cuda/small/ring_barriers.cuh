// Barriers between the loader warps and compute warps of a ring (ring_shape.h), on all architectures.
#pragma once

#include "cuda/small/ring_shape.h"
#include "cuda/tma/barriers.cuh"

namespace natten_jax::small {

CUTE_DEVICE void init_barrier(std::uint64_t& barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(shared_address(&barrier)), "r"(arrivals) : "memory");
}

/// `wait_for` and `arrive_at` are like `wait` and `arrive`, but do not require compute capability 9.0.
CUTE_DEVICE void wait_for(std::uint64_t& barrier, int parity) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  // Sleep between tests, because a spinning warp would take issue slots from the other warps. Waits are frequent: the
  // ring cannot hold the slabs for the steps of all warps at once.
  constexpr unsigned kNanoseconds = 20;
  for (unsigned is_complete = 0;;) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(is_complete)
        : "r"(shared_address(&barrier)), "r"(parity)
        : "memory");
    if (is_complete != 0) break;
    __nanosleep(kNanoseconds);
  }
#else
  wait(barrier, parity);
#endif
}
CUTE_DEVICE void arrive_at(std::uint64_t& barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  asm volatile(
      "{\n"
      ".reg .b64 state;\n"
      "mbarrier.arrive.shared::cta.b64 state, [%0];\n"
      "}"
      :
      : "r"(shared_address(&barrier))
      : "memory");
#else
  arrive(barrier);
#endif
}

/// mbarriers of a CTA, in shared memory: two for each slot of the ring, and two for each compute warp's tile buffer.
///
/// If loader warps copy chunks, lanes arrive separately at the barriers: lanes of loader warps when their copies are
/// complete, and lanes of compute warps after their reads. racecheck (compute-sanitizer) attributes an arrival only to
/// the lane that arrives. With one arrival per warp, it would report the reads of the other lanes. On an H100, the
/// kernel of query gradients took 0.94 to 0.98 times as long with arrivals of all lanes as with one arrival per warp.
/// The other kernels took 0.98 to 1.01 times as long. If loader warps use TMA to load boxes and also store data
/// themselves, their lanes and those of compute warps arrive separately too.
///
/// Args:
///   kLoads: method of loading slabs.
///   kStores: true if lanes of TMA loader warps also store data.
template <RingLoads kLoads, bool kStores = false>
struct RingBarriers {
  static constexpr int kMostWarps = 16;
  static constexpr bool kHasBoxes = kLoads == RingLoads::kBoxes, kLanesArrive = !kHasBoxes || kStores;
  static constexpr int kWarpArrivals = kLanesArrive ? 32 : 1;  // arrivals of a compute warp in each phase
  static constexpr int kLoaderArrivals = kHasBoxes ? 1 + (kStores ? 32 : 0) : 32;

  std::uint64_t full[kMostRingSlots], empty[kMostRingSlots];
  std::uint64_t has_tile[kMostWarps], has_room[kMostWarps];

  /// Initializes the barriers. A single thread has to call it.
  CUTE_DEVICE void init(const RingShape& shape) {
    CUTE_NO_UNROLL
    for (int i = 0; i < shape.slots; ++i) {
      init_barrier(full[i], kLoaderArrivals * ring_loaders(kLoads));
      init_barrier(empty[i], kWarpArrivals * shape.warps);
    }
    CUTE_NO_UNROLL
    for (int i = 0; i < shape.warps; ++i) {
      init_barrier(has_tile[i], kHasBoxes ? 1 : 32);
      init_barrier(has_room[i], kWarpArrivals);
    }
  }

  /// True if the lane has to arrive at a barrier when its warp has read a buffer.
  CUTE_DEVICE static bool is_arriving() { return kLanesArrive || threadIdx.x % 32 == 0; }

  /// If one lane arrives for its warp, orders the reads of the whole warp before this arrival.
  CUTE_DEVICE static void sync_reads() {
    if constexpr (!kLanesArrive) __syncwarp();
  }

  /// Calls sync_reads(), and returns is_arriving(). All lanes have to call it.
  CUTE_DEVICE static bool arrives() {
    sync_reads();
    return is_arriving();
  }
};

static_assert(sizeof(RingBarriers<RingLoads::kBoxes>) == kRingBarrierBytes);

}  // namespace natten_jax::small
