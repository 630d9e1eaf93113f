// Columns of a region as boxes that the copy engine loads, which takes compute capability 9.0: no thread spends
// instructions on them, and warps do not wait for each other. The last warp that has read a stage has it filled again.
#pragma once

#include <cutlass/arch/barrier.h>

#include "cuda/common/launch.cuh"
#include "cuda/small/copies.cuh"

namespace natten_jax::small {

/// Whether a kernel with or without boxes has code for the architecture.
constexpr bool is_compiled(bool has_boxes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  return !has_boxes;
#else
  return true;
#endif
}

/// Of a CTA, in shared memory: what few threads need seldom has no registers.
struct BoxState {
  std::uint64_t full[2];  // barriers of the stages
  std::uint64_t left[2];  // barriers of the warps that have read a stage
  int first[kRank];       // column of the box
};

/// As ChunkLoads; a warp's rows are in buffers of their own, which it fills for itself.
template <int kHeadDim, bool kRowsAreKeys>
class BoxLoads {
 public:
  CUTE_DEVICE BoxLoads(const CommonParams& p, char* raw)
      : p_(p),
        state_(*reinterpret_cast<BoxState*>(raw + p.region.shared.box_state)),
        stages_(shared_address(raw + p.region.shared.stages)),
        items_(p) {}

  /// Gets ready to have stages filled, and has the first ones filled where no other kernel writes what they hold.
  /// `first` is the box's first column, `warps` have rows.
  CUTE_DEVICE void start(const int (&first)[kRank], int warps) {
    if (threadIdx.x > 0) return;
    CUTE_UNROLL
    for (int d = 0; d < kRank; ++d) state_.first[d] = first[d];
    CUTE_UNROLL
    for (int stage = 0; stage < 2; ++stage) {
      cutlass::arch::ClusterBarrier::init(&state_.full[stage], 1);
      cutlass::arch::ClusterBarrier::init(&state_.left[stage], warps);
    }
    cutlass::arch::fence_barrier_init();
    if (!kRowsAreKeys) fill_first();
  }

  /// Goes over the items, as ChunkLoads does.
  template <class LoadRows, class LoadColumns, class Compute>
  CUTE_DEVICE void for_items(const Tables& tables, const TilePlan& tile, std::uint32_t rows_of_warp,
                             const LoadRows& load_rows, const LoadColumns&, const Compute& compute) {
    const std::uint32_t rows = stages_ - p_.region.shared.stages + p_.region.shared.rows + rows_of_warp;
    if (kRowsAreKeys) {
      wait_for_previous_kernel();
      if (threadIdx.x == 0) fill_first();
    }
    Item item(p_, items_.first);
    load_rows(item, rows);
    commit_copies();
    clear_past_boxes(tables.stages);
    __syncthreads();
    if (!tile.has_rows) return;
    int stage = 0, phase = 0;
    for (int i = 0; i < items_.count; ++i) {
      wait_copies<0>();
      __syncwarp();
      const auto load_next = [&] {
        Item next = item;
        next.next(p_);
        if (i + 1 < items_.count) load_rows(next, rows);
        commit_copies();
      };
      compute(item, stages_ + stage * p_.region.shared.stage_bytes, rows,
              Phases<decltype(load_next)>{*this, load_next, i, stage, phase});
      item.next(p_);
      if (++stage == p_.region.stages) {
        stage = 0;
        phase ^= 1;
      }
    }
  }

 private:
  static constexpr int kRowBytes = ColumnRows<kHeadDim, true>::kBytes;

  template <class LoadNext>
  struct Phases {
    const BoxLoads& loads;
    const LoadNext& load_next;
    int i, stage, phase;

    /// A warp's rows are in registers: those of the next item may come. From here on, columns are needed.
    CUTE_DEVICE void rows_are_read() const {
      __syncwarp();
      load_next();
      cutlass::arch::ClusterBarrier::wait(&loads.state_.full[stage], phase);
    }

    CUTE_DEVICE void columns_are_read() const { loads.leave(i, stage); }
  };

  CUTE_DEVICE void leave(int i, int stage) const {
    __syncwarp();
    if (threadIdx.x % 32 > 0) return;
    // How many were missing before this one.
    std::uint64_t before;
    unsigned missing;
    const std::uint32_t barrier = shared_address(&state_.left[stage]);
    asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1];" : "=l"(before) : "r"(barrier) : "memory");
    asm volatile("mbarrier.pending_count.b64 %0, %1;" : "=r"(missing) : "l"(before));
    i += p_.region.stages;
    if (missing > 1 || i >= items_.count) return;
    // What the others have read is ordered before what comes.
    unsigned is_complete;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.test_wait.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(is_complete)
        : "r"(barrier), "l"(before)
        : "memory");
    fill(i, stage);
  }

  CUTE_DEVICE void fill_first() const {
    for (int i = 0; i < min(p_.region.stages, items_.count); ++i) fill(i, i);
  }

  CUTE_DEVICE void fill(int i, int stage) const {
    const Item item(p_, items_.first + i);
    const std::uint32_t barrier = shared_address(&state_.full[stage]),
                        to = stages_ + stage * p_.region.shared.stage_bytes;
    const int statistics = kRowsAreKeys ? statistics_end() : 0;
    cutlass::arch::ClusterTransactionBarrier::arrive_and_expect_tx(&state_.full[stage],
                                                                   2 * p_.region.shared.box_end + statistics);
    const int head = (kRowsAreKeys ? item.head : item.head_kv(p_)) * kHeadDim;
    load(p_.columns[0], to, barrier, head, item.batch);
    load(p_.columns[1], to + p_.region.shared.second, barrier, head, item.batch);
    if constexpr (kRowsAreKeys) {
      constexpr int kFloats = kStatisticsBytes / sizeof(float);
      load(p_.columns[2], to + p_.region.shared.statistics, barrier, item.head * kFloats, item.batch);
    }
  }

  /// Where the box of statistics ends, counted from its begin.
  CUTE_DEVICE int statistics_end() const { return p_.region.shared.box_end / kRowBytes * kStatisticsBytes; }

  CUTE_DEVICE void load(const CUtensorMap& map, std::uint32_t to, std::uint32_t barrier, int head, int batch) const {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, %6}], "
        "[%7];"
        :
        : "r"(to), "l"(&map), "r"(head), "r"(state_.first[0]), "r"(state_.first[1]), "r"(state_.first[2]), "r"(batch),
          "r"(barrier)
        : "memory");
  }

  /// What no box covers is read nevertheless, and counts as nothing: what follows the boxes in the stages.
  CUTE_DEVICE void clear_past_boxes(char* stage) const {
    const SharedLayout& shared = p_.region.shared;
    for (int i = 0; i < p_.region.stages; ++i, stage += shared.stage_bytes) {
      clear(stage + shared.box_end, stage + shared.second);
      clear(stage + shared.second + shared.box_end, stage + shared.nowhere);
      if constexpr (kRowsAreKeys) {
        char* statistics = stage + shared.statistics;
        clear(statistics + statistics_end(),
              statistics + (shared.nowhere - shared.second) / kRowBytes * kStatisticsBytes);
      }
    }
  }

  const CommonParams& p_;
  BoxState& state_;
  std::uint32_t stages_;
  CtaItems items_;
  int first_[kRank];
  unsigned warps_;  // that have rows
};

template <int kHeadDim, bool kRowsAreKeys, bool kHasBoxes>
using Loads = std::conditional_t<kHasBoxes, BoxLoads<kHeadDim, kRowsAreKeys>, ChunkLoads>;

}  // namespace natten_jax::small
