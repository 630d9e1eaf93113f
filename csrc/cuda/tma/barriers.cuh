// mbarriers between threads and TMA, and rings of buffers that mbarriers guard. Requires compute capability 9.0.
#pragma once

#include <cutlass/arch/barrier.h>

#include <cstdint>

#include "cuda/warp/shared_memory.cuh"

namespace natten_jax {

using cutlass::arch::ClusterBarrier;
using cutlass::arch::ClusterTransactionBarrier;

CUTE_DEVICE void wait(std::uint64_t& barrier, int phase) {
  ClusterBarrier::wait(&barrier, phase);
}
CUTE_DEVICE void arrive(std::uint64_t& barrier) {
  ClusterBarrier::arrive(&barrier);
}

/// Returns true once loads from shared memory have ended. Use the result as the condition of the arrival that releases
/// the buffer.
///
/// Without this dependency, an arrival does not wait for earlier loads, because ptxas does not wait for their
/// scoreboards. TMA could then refill the buffer while the loads still read it.
///
/// Args:
///   loaded: a word that depends on the results of all loads.
CUTE_DEVICE bool loads_have_ended(std::uint32_t loaded) {
  std::uint32_t zero;  // always 0, because blockDim.x is at least 32; the compiler cannot infer this
  asm volatile("shr.u32 %0, %1, %2;" : "=r"(zero) : "r"(loaded), "r"(blockDim.x));
  return zero == 0;
}

/// Arrives once per warp, after all lanes have reached the call. Use it only if TMA is the other user of the buffer. If
/// other threads use the buffer, each thread must arrive, because compute-sanitizer's racecheck does not recognize that
/// one lane arrives for the whole warp.
CUTE_DEVICE void arrive_as_warp(std::uint64_t& barrier) {
  __syncwarp();
  if (cute::elect_one_sync()) arrive(barrier);
}

/// Arrives at an mbarrier in the CTA's shared memory. Returns the number of pending arrivals, including this one.
CUTE_DEVICE unsigned arrive_counting(std::uint64_t& barrier) {
  std::uint64_t state;
  unsigned missing;
  asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1];" : "=l"(state) : "r"(shared_address(&barrier)) : "memory");
  asm volatile("mbarrier.pending_count.b64 %0, %1;" : "=r"(missing) : "l"(state));
  return missing;
}

/// Position in a ring of buffers. Each buffer has a full barrier and an empty barrier.
template <int kSize>
struct Ring {
  int index = 0;
  int phase = 0;  // parity of the round: `wait_full` waits for this phase, `wait_empty` for the opposite one

  CUTE_DEVICE void wait_full(std::uint64_t (&full)[kSize]) const { wait(full[index], phase); }
  CUTE_DEVICE void wait_empty(std::uint64_t (&empty)[kSize]) const { wait(empty[index], phase ^ 1); }

  CUTE_DEVICE void advance() {
    if (++index == kSize) {
      index = 0;
      phase ^= 1;
    }
  }
  CUTE_DEVICE Ring next() const {
    Ring result = *this;
    result.advance();
    return result;
  }
};

/// State of a single buffer, with the interface of Ring.
struct SingleBuffer {
  int phase = 0;

  CUTE_DEVICE void wait_full(std::uint64_t& full) const { wait(full, phase); }
  CUTE_DEVICE void wait_empty(std::uint64_t& empty) const { wait(empty, phase ^ 1); }
  CUTE_DEVICE void advance() { phase ^= 1; }
};

CUTE_DEVICE cutlass::arch::ReservedNamedBarriers named_barrier(int id) {
  return static_cast<cutlass::arch::ReservedNamedBarriers>(id);
}

}  // namespace natten_jax
