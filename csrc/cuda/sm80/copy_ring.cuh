// Ring of buffers in shared memory, with barriers between the copies into a buffer and the reads from it.
#pragma once

#include <cstdint>

#include "cuda/warp/shared_memory.cuh"

namespace natten_jax::sm80 {

/// A ring of `kBuffers` buffers. Fill number `fill` uses buffer `fill % kBuffers`. All threads of a CTA take part in
/// every fill and read every buffer. A warp waits for another warp in two cases only: before it reads data that the
/// other warp copies, and before it overwrites a buffer that the other warp still reads.
///
/// The barriers are inline PTX, because CUTLASS's barriers require Hopper.
template <int kBuffers, int kThreads>
struct CopyRing {
  std::uint64_t full[kBuffers], free[kBuffers];  // mbarriers

  /// Initializes the mbarriers. The threads may use the ring only after a CTA barrier.
  CUTE_DEVICE void initialise() {
    if (threadIdx.x >= kBuffers) return;
    initialise(full[threadIdx.x]);
    initialise(free[threadIdx.x]);
  }

  /// Waits until all threads have released the previous fill of the buffer, so that `fill` can overwrite it.
  CUTE_DEVICE void wait_free(int fill) const {
    if (fill >= kBuffers) wait(free[fill % kBuffers], fill / kBuffers - 1);
  }

  /// Arrives at the barrier of a fill once all copies that this thread has started so far are complete.
  CUTE_DEVICE void arrive_copies(int fill) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(&full[fill % kBuffers]))
                 : "memory");
  }

  /// Waits until all copies of a fill, from all threads, are complete.
  CUTE_DEVICE void wait_full(int fill) const { wait(full[fill % kBuffers], fill / kBuffers); }

  /// Declares that this thread no longer reads a fill.
  CUTE_DEVICE void release(int fill) {
    __syncwarp();  // the lanes are converged here, but the compiler cannot infer it
    asm volatile("{\n .reg .b64 state;\n mbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(
                     shared_address(&free[fill % kBuffers]))
                 : "memory");
  }

 private:
  /// Initializes an mbarrier whose phase completes when all `kThreads` threads have arrived.
  CUTE_DEVICE static void initialise(std::uint64_t& barrier) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(kThreads) : "memory");
  }

  /// Waits until phase number `phase` of an mbarrier is complete.
  CUTE_DEVICE static void wait(const std::uint64_t& barrier, int phase) {
#if __CUDA_ARCH__ >= 900
#define NATTEN_JAX_MBARRIER_WAIT "mbarrier.try_wait.parity.shared.b64"
#else
#define NATTEN_JAX_MBARRIER_WAIT "mbarrier.test_wait.parity.shared.b64"
#endif
    asm volatile("{\n .reg .pred done;\nwait_%=:\n " NATTEN_JAX_MBARRIER_WAIT
                 " done, [%0], %1;\n @!done bra wait_%=;\n}" ::"r"(shared_address(&barrier)),
                 "r"(phase & 1)
                 : "memory");
#undef NATTEN_JAX_MBARRIER_WAIT
  }
};

}  // namespace natten_jax::sm80
