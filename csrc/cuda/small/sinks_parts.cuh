// Parts of the gradient of sinks, from kernels that own queries. For each of its rows, a warp multiplies the sink's
// softmax weight by delta. For each item, the warp adds up these products over its rows, and writes the sum as one
// part. Later, the parts of each sink are added up in a fixed order.
#pragma once

#include "cuda/common/launch.cuh"
#include "cuda/small/copies.cuh"
#include "natten_jax/logsumexp.h"

namespace natten_jax::small {

/// Returns the address of the warp's part for an item.
CUTE_DEVICE float* part_of_sink(const BackwardParams& p, const Item& item) {
  const SinksParams& sinks = p.sinks;
  const std::int64_t item_offset = sinks.are_shared
                                       ? item.head * sinks.next_sink + std::int64_t{item.batch} * sinks.tiles
                                       : item.number(p) * sinks.next_sink;
  return sinks.parts + item_offset + blockIdx.x * p.region.warps + threadIdx.x / 32;
}

/// Zeroes the warp's parts. They stay zero if the warp's tile has no queries.
template <class Items>
CUTE_DEVICE void clear_parts_of_sinks(const BackwardParams& p, const Items& items) {
  if (p.sinks.parts == nullptr) return;
  for (int i = threadIdx.x % 32; i < items.count; i += 32) *part_of_sink(p, items.at(p, i)) = 0.f;
  __syncwarp();
}

/// The sink of an item. It is loaded early, because a load directly before its use would stall the warp.
class ItemSink {
 public:
  CUTE_DEVICE ItemSink(const BackwardParams& p, const Item& item) {
    if (p.sinks.parts != nullptr) sink_ = __ldg(p.sinks.sinks + (p.sinks.are_shared ? item.head : item.number(p)));
  }

  /// Writes the warp's part for the item. Rows that see neither keys nor a sink add zero.
  ///
  /// Args:
  ///   at: indices of the lane's two rows; negative if a row is outside of the layout.
  ///   logsumexp: logsumexp of these rows, in base 2.
  ///   delta: delta of these rows; each number is stored twice.
  CUTE_DEVICE void write_part(const BackwardParams& p, const Item& item, const int (&at)[2],
                              const float (&logsumexp)[2], const float (&delta)[4]) const {
    if (p.sinks.parts == nullptr) return;
    float sum = 0.f;
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      const bool has_weights = at[r] >= 0 && logsumexp[r] != -INFINITY;
      sum += has_weights ? fast_exp2(at_most_zero(base2_logsumexp(sink_) - logsumexp[r])) * delta[2 * r] : 0.f;
    }
    // Four lanes hold the same two rows. Add up the sums of the eight groups of such lanes.
    CUTE_UNROLL
    for (int distance = 4; distance < 32; distance *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    if (threadIdx.x % 32 == 0) *part_of_sink(p, item) = sum;
  }

 private:
  float sink_ = 0.f;
};

/// Number of chunks, of four parts each, that a thread loads at once.
constexpr int kQuadsAtOnce = 4;

/// If `p.gradient` is not null, adds up the parts of each sink to its gradient. The sinks are distributed over the
/// CTAs. All threads have to call it, after all other uses of shared memory. Not inlined, because inlining changes the
/// register allocation of the calling kernel.
///
/// Args:
///   p: parameters.
///   warp_sums: shared memory for one sum per warp. It must not overlap with mbarriers, which would have to be
///     invalidated first: when a CTA was preempted, an old mbarrier overwrote a sum.
__device__ __noinline__ inline void add_up_sinks(const SinksParams& p, float* warp_sums) {
  if (p.gradient == nullptr) return;
  const std::int64_t ctas = std::int64_t{gridDim.x} * gridDim.y;
  for (std::int64_t sink = std::int64_t{blockIdx.y} * gridDim.x + blockIdx.x; sink < p.count; sink += ctas) {
    wait_for_previous_kernel();
    const float* const parts = p.parts + sink * p.next_sink;
    const int quads = p.parts_of_sink / 4;
    float sum = threadIdx.x < p.parts_of_sink % 4 ? load_written(parts + 4 * quads + threadIdx.x) : 0.f;
    for (int first = threadIdx.x; first < quads; first += kQuadsAtOnce * blockDim.x) {
      // Issue all loads before the first use. With one load at a time, 12,544 numbers took 35 microseconds.
      float4 quad[kQuadsAtOnce];
      CUTE_UNROLL
      for (int i = 0; i < kQuadsAtOnce; ++i) {
        const int at = first + i * blockDim.x;
        quad[i] =
            at < quads ? load_written(reinterpret_cast<const float4*>(parts) + at) : make_float4(0.f, 0.f, 0.f, 0.f);
      }
      CUTE_UNROLL
      for (int i = 0; i < kQuadsAtOnce; ++i) sum += (quad[i].x + quad[i].y) + (quad[i].z + quad[i].w);
    }
    CUTE_UNROLL
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    __syncthreads();
    if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x >= 32) continue;
    float all = threadIdx.x < blockDim.x / 32 ? warp_sums[threadIdx.x] : 0.f;
    CUTE_UNROLL
    for (int distance = 16; distance > 0; distance /= 2) all += __shfl_xor_sync(0xffffffffu, all, distance);
    // The gradient is negative, because a sink reduces all other weights without adding a value.
    if (threadIdx.x == 0) p.gradient[sink] = -all;
  }
}

}  // namespace natten_jax::small
