// Ring of buffers in shared memory, between the threads that copy into them and the warps that read them.
#pragma once

#include <cstdint>

#include "cuda/warp/shared_memory.cuh"

namespace natten_jax::sm80 {

/// Buffers that are filled in turn; fills are numbered. All threads of a CTA fill a buffer and read it. A warp waits
/// for another warp only when it needs data that the other copies, or a buffer that the other reads.
///
/// CUTLASS's barriers require Hopper, so this uses inline PTX.
template <int kBuffers, int kThreads>
struct CopyRing {
  std::uint64_t full[kBuffers], free[kBuffers];  // mbarriers

  /// Initialises the mbarriers. A CTA barrier must follow before use.
  CUTE_DEVICE void initialise() {
    if (threadIdx.x >= kBuffers) return;
    initialise(full[threadIdx.x]);
    initialise(free[threadIdx.x]);
  }

  /// Waits until all threads have read the previous contents of a fill's buffer.
  CUTE_DEVICE void wait_free(int fill) const {
    if (fill >= kBuffers) wait(free[fill % kBuffers], fill / kBuffers - 1);
  }

  /// Arrives for all copies that this thread has started, which belong to this fill or to earlier ones.
  CUTE_DEVICE void arrive_copies(int fill) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(&full[fill % kBuffers]))
                 : "memory");
  }

  /// Waits until all threads' copies of a fill have ended.
  CUTE_DEVICE void wait_full(int fill) const { wait(full[fill % kBuffers], fill / kBuffers); }

  /// Arrives when this thread no longer reads a fill.
  CUTE_DEVICE void release(int fill) {
    __syncwarp();  // lanes have converged anyway, and this informs the compiler
    asm volatile("{\n .reg .b64 state;\n mbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(
                     shared_address(&free[fill % kBuffers]))
                 : "memory");
  }

 private:
  /// Initialises an mbarrier that opens when all threads have arrived.
  CUTE_DEVICE static void initialise(std::uint64_t& barrier) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(kThreads) : "memory");
  }

  /// Waits for the end of an mbarrier's phase, by the phase's number.
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
