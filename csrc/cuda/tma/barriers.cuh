// mbarriers between threads and TMA, and rings of buffers that they guard. Requires compute capability 9.0.
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

/// Returns true once loads from shared memory have ended. Arrivals that release a buffer must depend on the result.
///
/// An arrival does not wait for loads that were issued before it: ptxas leaves their scoreboards pending, and the
/// buffer may be filled again while they read it.
///
/// Args:
///   loaded: a word that depends on all of the loads.
CUTE_DEVICE bool loads_have_ended(std::uint32_t loaded) {
  std::uint32_t zero;  // all bits are shifted out, by a number that is opaque to the compiler
  asm volatile("shr.u32 %0, %1, %2;" : "=r"(zero) : "r"(loaded), "r"(blockDim.x));
  return zero == 0;
}

/// Arrives once per warp, after its lanes. Use it only for buffers that are otherwise accessed by TMA: if threads
/// access them, each thread must arrive, because racecheck does not see that a lane arrives for others.
CUTE_DEVICE void arrive_as_warp(std::uint64_t& barrier) {
  __syncwarp();
  if (cute::elect_one_sync()) arrive(barrier);
}

/// Arrives at an mbarrier of one CTA. Returns the number of arrivals that were missing before this one.
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
  int phase = 0;  // parity of the round: the full barrier's phase, and the opposite of the empty barrier's

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
