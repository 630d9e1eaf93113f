// Loads of a region's columns as boxes with TMA, for compute capability 9.0. Threads need no instructions for these
// copies, and warps do not wait for each other. When all warps have read a stage, the last of them starts to refill it.
#pragma once

#include "cuda/common/launch.cuh"
#include "cuda/small/copies.cuh"
#include "cuda/tma/boxes.cuh"
#include "cuda/tma/entry_maps.cuh"

namespace natten_jax::small {

/// True if kernels with boxes (`has_boxes`), or without boxes, are compiled for the current architecture.
constexpr bool is_compiled(bool has_boxes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  return !has_boxes;
#else
  return true;
#endif
}

/// Rarely used per-CTA state, kept in shared memory to save registers.
struct BoxState {
  std::uint64_t full[2];   // Barriers: the stage is loaded.
  std::uint64_t empty[2];  // Barriers: all warps have read the stage.
  EntryItems items;        // Items of the current plan. Used only with per-entry layouts.
  int first[kRank];        // First column of the box.
  int warps;               // Number of warps that have rows.
};

/// Empty type of a member that a kernel does not need.
struct NoItems {};

/// Makes the thread arrive at a barrier when all copies that it has started are complete. Does not wait for them.
CUTE_DEVICE void arrive_with_copies(std::uint64_t& barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" : : "r"(shared_address(&barrier)) : "memory");
}

/// Loads of a region's columns with TMA. The interface is that of ChunkLoads. Each warp copies its rows into buffers
/// that are not part of a stage.
template <int kHeadDim, Kernel kKernel, class Items, bool kHasBias = false>
class BoxLoads {
 public:
  static constexpr bool kRowsAreKeys = kKernel == Kernel::kKeyValueGradient;
  static constexpr bool kIsWhole = kKernel == Kernel::kWholeGradient;
  static constexpr bool kMayWrap = Items::kMayWrap, kIsPlain = Items::kIsPlain;
  static constexpr int kBoxes = boxes_of(kKernel);
  static constexpr bool kHasResultsInRows = has_results_in_rows(kKernel, Items::kPerEntry);
  // Number of arrivals by which a warp reports that it has read a stage. With a relative bias, every lane arrives. If a
  // single lane arrived for its warp, compute-sanitizer's racecheck would report the other lanes' reads of the table as
  // races.
  static constexpr int kReleasesPerWarp = kHasBias ? 32 : 1;

  CUTE_DEVICE BoxLoads(const CommonParams& p, char* raw)
      : p_(p),
        state_(*reinterpret_cast<BoxState*>(raw + p.region.shared.box_state)),
        stages_(shared_address(raw + p.region.shared.stages)) {
    // Prefetches the tensor maps only in the kernel of whole layouts. With the prefetch, this kernel took 116.5 instead
    // of 121 microseconds with dilation 8, and 21.2 instead of 22.4 microseconds with 7 x 7 tokens. The other gradient
    // kernels took 4% longer with it.
    if constexpr (kIsWhole) {
      if (threadIdx.x > 0) return;
      CUTE_UNROLL
      for (int box = 0; box < kBoxes; ++box) {
        cute::prefetch_tma_descriptor(&p.columns[box]);
      }
    }
  }

  /// Sets the items of the next plan. Must be called before each plan, when all threads have finished the previous
  /// plan.
  CUTE_DEVICE void take(const Items& items, bool is_first) {
    if constexpr (Items::kPerEntry) {
      if (threadIdx.x > 0) return;
      state_.items = items;
      if (is_first) return;
      CUTE_UNROLL
      for (int stage = 0; stage < 2; ++stage) {
        ClusterBarrier::invalidate(&state_.full[stage]);
        ClusterBarrier::invalidate(&state_.empty[stage]);
      }
    } else {
      items_ = items;
    }
  }

  /// Starts to load the first stages, except the data that the previous kernel writes. `first` is the first column of
  /// the box, and `warps` is the number of warps with rows. If `crosses_seam`, the columns lie on both sides of a seam
  /// (an end of a dimension that wraps). TMA cannot load such columns as a box, so all threads copy them later.
  CUTE_DEVICE void start(const int (&first)[kRank], int warps, bool crosses_seam = false) {
    if constexpr (kMayWrap) crosses_seam_ = crosses_seam;
    if (threadIdx.x > 0) return;
    CUTE_UNROLL
    for (int d = 0; d < kRank; ++d) state_.first[d] = first[d];
    CUTE_UNROLL
    for (int stage = 0; stage < 2; ++stage) {
      ClusterBarrier::init(&state_.full[stage], crosses_seam ? static_cast<int>(blockDim.x) : 1);
      ClusterBarrier::init(&state_.empty[stage], warps * kReleasesPerWarp);
    }
    state_.warps = warps;
    cutlass::arch::fence_barrier_init();
    if constexpr (Items::kPerEntry) {
      if (items().maps >= 0) {
        // In the forward pass, the previous kernel makes the tensor maps. In the backward pass, the maps were complete
        // before the previous kernel started. That kernel may fill padding, but these loads do not need the padding.
        if constexpr (kKernel == Kernel::kForward) wait_for_previous_kernel();
        // Other threads that issue TMA loads need not acquire the maps again, because they issue them after this
        // thread.
        const CUtensorMap* const maps = p_.entry_maps + items().maps * kEntryMaps;
        for (int i = 0; i < kBoxes + kRowsAreKeys; ++i) acquire_map(maps + i);
      }
    }
    if (!crosses_seam) for_first([&](int i) { fill(i, i); });
  }

  /// Starts to load a warp's rows of the first item. The warp makes its plan during this load.
  template <class LoadRows>
  CUTE_DEVICE void load_first_rows(const Item& first, std::uint32_t rows_of_warp, const LoadRows& load_rows) const {
    load_rows(first, rows(rows_of_warp));
    commit_copies();
  }

  /// Returns the number of warps with rows. All threads have to call this function before any of them loops over the
  /// items.
  CUTE_DEVICE int warps_with_rows() const {
    __syncthreads();
    return state_.warps;
  }

  /// Loops over the items, as ChunkLoads::for_items does.
  template <class LoadRows, class LoadColumns, class Compute>
  CUTE_DEVICE void for_items(const Tables& tables, const TilePlan& tile, std::uint32_t rows_of_warp,
                             const LoadRows& load_rows, [[maybe_unused]] const LoadColumns& load_columns,
                             const Compute& compute) {
    const std::uint32_t rows = this->rows(rows_of_warp);
    if (kRowsAreKeys) {
      wait_for_previous_kernel();
      if (threadIdx.x == 0 && !crosses_seam()) for_first([&](int i) { fill_statistics(i, i); });
    }
    if (crosses_seam()) {
      clear(tables.stages, tables.stages + p_.region.stages * p_.region.shared.stage_bytes);
    } else {
      clear_past_boxes(tables.stages);
    }
    __syncthreads();
    if (!tile.has_rows && !crosses_seam()) return;
    const int count = items().count;
    [[maybe_unused]] const auto copy_columns = [&](int i, int stage) {
      if constexpr (kMayWrap) {
        load_columns(items().at(p_, i), stages_ + stage * p_.region.shared.stage_bytes);
        arrive_with_copies(state_.full[stage]);
      }
    };
    if (crosses_seam()) for_first([&](int i) { copy_columns(i, i); });
    Item item = items().at(p_, 0);
    int stage = 0, phase = 0;
    for (int i = 0; i < count; ++i) {
      wait_copies<0>();
      __syncwarp();
      const auto load_next = [&] {
        Item next = item;
        items().advance(p_, next, i + 1);
        if (i + 1 < count) load_rows(next, rows);
        commit_copies();
      };
      compute(item, stages_ + stage * p_.region.shared.stage_bytes, rows,
              Phases<decltype(load_next)>{*this, load_next, i, stage, phase});
      items().advance(p_, item, i + 1);
      if (crosses_seam() && i + p_.region.stages < count) {
        wait(state_.empty[stage], phase);
        copy_columns(i + p_.region.stages, stage);
      }
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

    /// Called when the warp's rows are in registers. Starts to load the next item's rows, unless the buffer of rows
    /// also stages results. Then waits for the columns of the current item.
    CUTE_DEVICE void rows_are_read() const {
      __syncwarp();
      if constexpr (!kHasResultsInRows) load_next();
      wait(loads.state_.full[stage], phase);
    }

    CUTE_DEVICE void columns_are_read() const { loads.release(i, stage, phase); }

    /// Called when the warp's results have left their staging buffer. If this is the buffer of rows, starts to load the
    /// next item's rows.
    CUTE_DEVICE void results_are_written() const {
      if constexpr (kHasResultsInRows) {
        __syncwarp();
        load_next();
      }
    }
  };

  CUTE_DEVICE void release(int i, int stage, int phase) const {
    std::uint64_t& empty = state_.empty[stage];
    if (kReleasesPerWarp > 1 && threadIdx.x % 32 > 0) arrive(empty);
    __syncwarp();
    if (threadIdx.x % 32 > 0) return;
    // This wait never blocks: the stage was refilled only after all warps had read its previous contents. It orders the
    // uses of the barrier for compute-sanitizer's racecheck.
    wait(empty, phase ^ 1);
    const unsigned missing = arrive_counting(empty);
    i += p_.region.stages;
    if (crosses_seam() || missing > 1 || i >= items().count) return;
    // This wait does not block either. It orders the reads of the other warps before the refill.
    wait(empty, phase);
    fill(i, stage);
    fill_statistics(i, stage);
  }

  template <class Call>
  CUTE_DEVICE void for_first(const Call& call) const {
    for (int i = 0; i < min(p_.region.stages, items().count); ++i) call(i);
  }

  CUTE_DEVICE std::uint32_t rows(std::uint32_t warp_offset) const {
    return stages_ - p_.region.shared.stages + p_.region.shared.rows + warp_offset;
  }

  /// Returns the tensor map of the array with index `box`. It is the map of the plan's batch entries, if they have
  /// separate maps, otherwise the map of the launch.
  CUTE_DEVICE const CUtensorMap& map_of(int box) const {
    if constexpr (Items::kPerEntry) {
      if (items().maps >= 0) return p_.entry_maps[items().maps * kEntryMaps + box];
    }
    return p_.columns[box];
  }

  /// Starts to load a stage for the `i`th item, except the statistics.
  CUTE_DEVICE void fill(int i, int stage) const {
    const Item item = items().at(p_, i);
    const std::uint32_t barrier = shared_address(&state_.full[stage]),
                        to = stages_ + stage * p_.region.shared.stage_bytes;
    const int statistics = kRowsAreKeys ? statistics_end() : 0;
    const int table = kHasBias ? 4 * p_.region.table_entries : 0;
    ClusterTransactionBarrier::arrive_and_expect_tx(&state_.full[stage],
                                                    kBoxes * p_.region.shared.box_end + statistics + table);
    if constexpr (kHasBias) {
      load_bytes(to + p_.region.shared.table + 4 * p_.region.table_margin, item.table(p_), table, barrier);
    }
    CUTE_UNROLL
    for (int box = 0; box < kBoxes; ++box) {
      const bool are_queries = kRowsAreKeys || box >= 2;
      load_box(map_of(box), to + box * p_.region.shared.second, barrier,
               (are_queries ? item.head : item.head_kv(p_)) * kHeadDim, state_.first[0], state_.first[1],
               state_.first[2], item.batch);
    }
  }

  /// Starts to load the statistics of a stage, if rows are keys. The previous kernel writes the statistics.
  CUTE_DEVICE void fill_statistics(int i, int stage) const {
    if constexpr (kRowsAreKeys) {
      const Item item = items().at(p_, i);
      constexpr int kFloats = kStatisticsBytes / sizeof(float);
      load_box(map_of(2), stages_ + stage * p_.region.shared.stage_bytes + p_.region.shared.statistics,
               shared_address(&state_.full[stage]), item.head * kFloats, state_.first[0], state_.first[1],
               state_.first[2], item.batch);
    }
  }

  /// Returns the size in bytes of the box of statistics.
  CUTE_DEVICE int statistics_end() const { return p_.region.shared.box_end / kRowBytes * kStatisticsBytes; }

  /// Zeroes the parts of the stages that boxes do not cover. The kernel reads these parts, so they must be finite.
  CUTE_DEVICE void clear_past_boxes(char* stage) const {
    const SharedLayout& shared = p_.region.shared;
    for (int i = 0; i < p_.region.stages; ++i, stage += shared.stage_bytes) {
      CUTE_UNROLL
      for (int box = 0; box < kBoxes; ++box) {
        char* begin = stage + box * shared.second;
        clear(begin + shared.box_end, box + 1 < kBoxes ? begin + shared.second : stage + shared.boxes_end);
      }
      if constexpr (kRowsAreKeys || kIsWhole) {
        char* statistics = stage + shared.statistics;
        clear(statistics + (kIsWhole ? 0 : statistics_end()),
              statistics + (shared.boxes_end - (kBoxes - 1) * shared.second) / kRowBytes * kStatisticsBytes);
      }
      if constexpr (kHasBias) {
        const int margin = 4 * p_.region.table_margin;
        char* table = stage + shared.table + margin;
        clear(table - margin, table);
        table += 4 * p_.region.table_entries;
        clear(table, table + margin);
      }
    }
  }

  CUTE_DEVICE bool crosses_seam() const {
    if constexpr (kMayWrap) {
      return crosses_seam_;
    } else {
      return false;
    }
  }

  /// Returns the items. With per-entry layouts, they are kept in shared memory, to save registers.
  CUTE_DEVICE const Items& items() const {
    if constexpr (Items::kPerEntry) {
      return state_.items;
    } else {
      return items_;
    }
  }

  const CommonParams& p_;
  BoxState& state_;
  std::uint32_t stages_;
  std::conditional_t<Items::kPerEntry, NoItems, Items> items_;
  std::conditional_t<kMayWrap, bool, NoItems> crosses_seam_;
};

/// Loads for the second plan of a CTA. It loads nothing, because both plans use the loads of the first plan.
struct NoLoads {
  static constexpr bool kMayWrap = false, kIsPlain = false;

  CUTE_DEVICE void start(const int (&)[kRank], int) const {}
};

template <int kHeadDim, Kernel kKernel, bool kHasBoxes, class Items, bool kHasBias = false>
using Loads = std::conditional_t<kHasBoxes, BoxLoads<kHeadDim, kKernel, Items, kHasBias>, ChunkLoads<Items>>;

}  // namespace natten_jax::small
