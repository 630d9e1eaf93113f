// The barriers of a ring, on any architecture: what those that load and those that multiply wait for.
#pragma once

#include "cuda/small/ring_shape.h"
#include "cuda/tma/barriers.cuh"

namespace natten_jax::small {

CUTE_DEVICE void init_barrier(std::uint64_t& barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(shared_address(&barrier)), "r"(arrivals) : "memory");
}

/// As `wait` and `arrive`, which take compute capability 9.0.
CUTE_DEVICE void wait_for(std::uint64_t& barrier, int parity) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  // A warp that only asks would take the instructions' turns from others, and warps whose step the ring has no room for
  // wait all the time.
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

/// Barriers of a CTA, in shared memory: of slabs, and of the buffer that a warp has for its tiles.
///
/// Where warps copy chunks, each of their lanes arrives for itself as its copies end, and each lane that has read them,
/// too: of one arrival for a warp, racecheck sees that its lane is done, and reports what the others read. With that,
/// query gradients took an H100 0.94 to 0.98 times as long, others 0.98 to 1.01 times.
/// So it is where lanes store something beside boxes, too.
///
/// Args:
///   kLoads: how slabs come.
///   kStores: whether lanes of the warps that have boxes loaded store something beside them.
template <RingLoads kLoads, bool kStores = false>
struct RingBarriers {
  static constexpr int kMostWarps = 16;
  static constexpr bool kHasBoxes = kLoads == RingLoads::kBoxes, kIsOfLanes = !kHasBoxes || kStores;
  static constexpr int kOfWarp = kIsOfLanes ? 32 : 1;  // arrivals
  static constexpr int kOfLoader = kHasBoxes ? 1 + (kStores ? 32 : 0) : 32;

  std::uint64_t full[kMostRingSlots], empty[kMostRingSlots];
  std::uint64_t has_tile[kMostWarps], has_room[kMostWarps];

  /// Sets them up; one thread has to call it.
  CUTE_DEVICE void init(const RingShape& shape) {
    CUTE_NO_UNROLL
    for (int i = 0; i < shape.slots; ++i) {
      init_barrier(full[i], kOfLoader * ring_loaders(kLoads));
      init_barrier(empty[i], kOfWarp * shape.warps);
    }
    CUTE_NO_UNROLL
    for (int i = 0; i < shape.warps; ++i) {
      init_barrier(has_tile[i], kHasBoxes ? 1 : 32);
      init_barrier(has_room[i], kOfWarp);
    }
  }

  /// True if the lane arrives once its warp has read a buffer.
  CUTE_DEVICE static bool is_arriving() { return kIsOfLanes || threadIdx.x % 32 == 0; }

  /// Orders the reads of a warp before the arrival of one lane for all of them.
  CUTE_DEVICE static void meet() {
    if constexpr (!kIsOfLanes) __syncwarp();
  }

  /// Both at once; all lanes have to call it.
  CUTE_DEVICE static bool arrives() {
    meet();
    return is_arriving();
  }
};

static_assert(sizeof(RingBarriers<RingLoads::kBoxes>) == kRingBarrierBytes);

}  // namespace natten_jax::small
