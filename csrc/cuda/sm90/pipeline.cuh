// What the pipelines of the Hopper kernels are made of: threads, barriers, tile loads.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/numeric_types.h>

#include <cute/tensor.hpp>

#include "cuda/sm90/forms.h"

namespace natten_jax::sm90 {

using namespace cute;
using cutlass::arch::ClusterBarrier;
using cutlass::arch::ClusterTransactionBarrier;

constexpr int kChunk = 64;  // elements of a 128-byte swizzled row: head dimensions are loaded in chunks of this many

CUTE_DEVICE void wait(std::uint64_t& barrier, int phase) {
  ClusterBarrier::wait(&barrier, phase);
}
CUTE_DEVICE void arrive(std::uint64_t& barrier) {
  ClusterBarrier::arrive(&barrier);
}

/// One arrival for a warp, once all of its lanes have come, at a barrier of what the copy engine alone reads or writes
/// besides. Where threads do, each arrives for itself: racecheck does not see that a lane stands for others.
CUTE_DEVICE void arrive_as_warp(std::uint64_t& barrier) {
  __syncwarp();
  if (elect_one_sync()) arrive(barrier);
}

/// A place in a ring of buffers, each of which has a barrier for being full and one for being empty.
template <int kSize>
struct Ring {
  int index = 0;
  int phase = 0;  // parity of the rounds: of a full barrier's phase, and the opposite of an empty one's

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

/// The same for a single buffer.
struct SingleBuffer {
  int phase = 0;

  CUTE_DEVICE void wait_full(std::uint64_t& full) const { wait(full, phase); }
  CUTE_DEVICE void wait_empty(std::uint64_t& empty) const { wait(empty, phase ^ 1); }
  CUTE_DEVICE void advance() { phase ^= 1; }
};

CUTE_DEVICE cutlass::arch::ReservedNamedBarriers named_barrier(int id) {
  return static_cast<cutlass::arch::ReservedNamedBarriers>(id);
}

/// Rows of `kElements` elements that a head is loaded or stored in; of the last one, what lies past the head is zero,
/// or is not stored.
template <int kElements>
CUTE_DEVICE int rows_of_head(int head_dim) {
  return (head_dim + kElements - 1) / kElements;
}

/// Whether products of heads, in a form for those of `kSteps` steps, end before a step: what lies behind the chunks of
/// a head is not loaded, and holds whatever was there before. Each question is a branch, at which ptxas orders
/// registers anew, so it is asked at the end of each chunk and, as most heads end there, at every step of the form's
/// last one.
template <int kSteps>
CUTE_DEVICE bool end_before(int step, int head_dim) {
  constexpr int kOfChunk = kChunk / kStep;
  const bool is_asked = step > 0 && (step % kOfChunk == 0 || step > kSteps - kOfChunk);
  return is_asked && step * kStep >= head_dim;
}

/// Loads a tile, chunk by chunk of its head dimension; coordinates come as a head map has its dimensions. Threads that
/// have few registers unroll less.
template <int kUnroll = 4, class Element>
CUTE_DEVICE void load_tile(const CUtensorMap* map, std::uint64_t* barrier, Element* destination, int chunks,
                           int tile_rows, int z, int y, int x, int slot) {
#pragma unroll kUnroll
  for (int chunk = 0; chunk < chunks; ++chunk) {
    SM90_TMA_LOAD_5D::copy(map, barrier, static_cast<std::uint64_t>(TMA::CacheHintSm90::EVICT_NORMAL),
                           destination + chunk * tile_rows * kChunk, chunk * kChunk, z, y, x, slot);
  }
}

}  // namespace natten_jax::sm90
