// Main loops of the warps of kernels with a ring (ring_shape.h): TMA loader warps and compute warps. The warps move
// along a strip.
#pragma once

#include "cuda/small/products.cuh"
#include "cuda/small/ring_barriers.cuh"
#include "cuda/small/ring_key_bias.cuh"
#include "cuda/small/ring_strip.cuh"
#include "cuda/tma/boxes.cuh"

namespace natten_jax::small {

/// Number of warps that issue TMA loads.
inline constexpr int kBoxLoaders = ring_loaders(RingLoads::kBoxes);

/// Main loop of a TMA loader warp. It loads its part of each slab and of each step's tiles, in the order in which the
/// steps need them. There are several loader warps, because a single warp would issue a copy only every 130 cycles, and
/// a step needs up to 30 copies.
template <class Params, int kHeadDim>
CUTE_DEVICE void load_ring(const Params& p, const RingAlong& along, int warp, std::uint32_t shared,
                           RingBarriers<RingLoads::kBoxes, kLanesStore<Params>>& barriers) {
  // If loader warps store key biases, all of their lanes store biases, and one lane also issues the TMA loads.
  // Otherwise, only this lane calls load_ring.
  constexpr bool kStores = kLanesStore<Params>;
  const bool is_loader = !kStores || threadIdx.x % 32 == 0;
  constexpr bool kRowsAreKeys = Params::kKernel == Kernel::kKeyValueGradient;
  constexpr int kTileArrays = ring_tile_arrays(Params::kKernel);
  const RingShape& shape = p.shape;
  // The warp loads every second group of slabs in its array.
  const int first_group = warp / 2;
  const bool is_second = warp % 2 != 0;
  const int groups = (shape.groups - first_group + 1) / 2, group_bytes = shape.group_blocks * kBlockKeys * 2 * kHeadDim;
  const CUtensorMap& map = is_second ? p.slabs[1] : p.slabs[0];
  const std::uint32_t tiles = shared + shape.tiles;
  // Two of the four warps load the first array. They also load the statistics of queries.
  const int statistics_bytes = kRowsAreKeys && !is_second ? shape.group_blocks * kBlockKeys * kStatisticsBytes : 0;
  const std::uint32_t statistics = shared + shape.statistics + first_group * statistics_bytes;
  shared += first_group * group_bytes + (is_second ? shape.array_bytes : 0);
  [[maybe_unused]] const std::uint32_t first_bias = statistics;  // biases are stored in place of statistics
  [[maybe_unused]] RingKeyBiasLoader<Params> biases(p, warp);
  RingPosition position;
  int warp_set = 0;
  unsigned parities = 0;  // parities of the tiles' barriers: one bit per warp set (RingShape::warp_sets)
  for (int round = 0, number; (number = unit_of_round(p, round)) < p.units; ++round) {
    const RingUnit unit(p, number);
    const RingStrip<kRowsAreKeys> strip(p, unit);
    const int head = unit.head * kHeadDim, head_kv = unit.head_kv(p) * kHeadDim;
    int loaded = along.step_slabs(unit.step).x;
    if constexpr (kStores) {
      biases.enter(unit, strip);
      biases.load(along.first_key(loaded));
    }
    for (int step = unit.step; step < unit.end; ++step) {
      if constexpr (kTileArrays > 0) {
        const int adjacent = shape.adjacent[0] * shape.adjacent[1];
        for (int i = warp; i < adjacent; i += kBoxLoaders) {
          const int reader = warp_set * adjacent + i;
          int row[kRank];
          first_row(p, unit, reader, row);
          std::uint64_t& full = barriers.has_tile[reader];
          wait(barriers.has_room[reader], (parities >> warp_set & 1) ^ 1);
          if (is_loader) {
            ClusterTransactionBarrier::arrive_and_expect_tx(&full, kTileArrays * shape.tile_bytes);
            CUTE_UNROLL
            for (int array = 0; array < kTileArrays; ++array) {
              load_box(p.tiles[array], tiles + (kTileArrays * reader + array) * shape.tile_bytes, shared_address(&full),
                       head, row[0], row[1], row[2] + step * shape.rows[2], unit.batch);
            }
          }
          if constexpr (kStores) __syncwarp();
        }
        parities ^= 1u << warp_set;
        if (++warp_set == shape.warp_sets()) warp_set = 0;
      }
      for (const int end = along.step_slabs(step).y; loaded < end; ++loaded) {
        std::uint64_t& full = barriers.full[position.slot];
        if constexpr (kStores) {
          biases.convert();
          biases.load(along.first_key(loaded + 1));
        }
        wait(barriers.empty[position.slot], position.parity ^ 1);
        if constexpr (kStores) {
          biases.store(first_bias + position.slot * shape.groups * shape.group_blocks * kKeyBiasBytes);
          arrive_at(full);
        }
        if (is_loader) {
          ClusterTransactionBarrier::arrive_and_expect_tx(&full, groups * (group_bytes + statistics_bytes));
          std::uint32_t to = shared + position.slot * 2 * shape.array_bytes;
          std::uint32_t statistics_to = statistics + position.slot * shape.groups * statistics_bytes;
          int across = strip.across + first_group * shape.wide;
          for (int group = 0; group < groups; ++group) {
            load_box(map, to, shared_address(&full), head_kv, across, strip.inside, along.first_key(loaded),
                     unit.batch);
            if constexpr (kRowsAreKeys) {
              if (statistics_bytes > 0) {
                load_box(p.statistics_slabs, statistics_to, shared_address(&full), unit.head * (kStatisticsBytes / 2),
                         across, strip.inside, along.first_key(loaded), unit.batch);
              }
              statistics_to += 2 * statistics_bytes;
            }
            to += 2 * group_bytes;
            across += 2 * shape.wide;
          }
        }
        // Keep the lanes together: lanes that run ahead would wait for a free slot for the next slab, and block the
        // lane that issues TMA loads.
        if constexpr (kStores) __syncwarp();
        position.advance(shape.slots);
      }
    }
  }
}

/// Deferred steps of a unit, as a bit mask. A warp recomputes them after all other steps of the unit, because the main
/// loop is short of registers.
template <RingLoads kLoads>
class LateSteps {
 public:
  /// Adds a step. `index` is its index in the unit.
  CUTE_DEVICE void add(int index) { mask_ |= Mask{1} << index; }

  /// Calls `call(index)` with the index of each deferred step, and clears the mask.
  template <class Call>
  CUTE_DEVICE void for_each(const Call& call) {
    CUTE_NO_UNROLL
    for (; mask_ != 0; mask_ &= mask_ - 1) call(first());
  }

 private:
  using Mask = std::conditional_t<most_segment_steps(kLoads) == 32, unsigned, unsigned long long>;

  CUTE_DEVICE int first() const {
    if constexpr (most_segment_steps(kLoads) == 32) return __ffs(mask_) - 1;
    return __ffsll(mask_) - 1;
  }

  Mask mask_ = 0;  // one bit per step
};

/// A compute warp: its main loop, the addresses at which it reads slabs and tiles, and its barriers.
template <class Element, int kHeadDim, class Params, class Masks, RingLoads kLoads>
struct RingReader {
  static constexpr bool kRowsAreKeys = Masks::kRowsAreKeys;
  static constexpr bool kHasKeyBias = kLanesStore<Params>;
  static constexpr int kTileArrays = ring_tile_arrays(Params::kKernel);
  /// If true, the warp releases a slab at the start of the next iteration of the loop over slabs, otherwise at the end
  /// of the iteration that reads it. On an H200, windows of 13 x 13 on 128 x 128 tokens took 1.1% less time with late
  /// releases and heads of 64, but 2% more time with heads of 32. With key biases and heads of 64, they took 0.4% less
  /// time in the forward pass, but 1.5% more time in the backward pass.
  static constexpr bool kReleasesLate = kHeadDim == 64 && !kHasKeyBias;
  /// True if the main loop keeps values in registers that it would otherwise compute again at low cost. With heads of
  /// 32, no registers are free for these values. With heads of 64, a warp has more registers, and a CTA has fewer warps
  /// to hide the latency at the end of each step.
  static constexpr bool kHasSpareRegisters = kHeadDim == 64;
  // Bytes of the data of a column (statistics or key biases), and number of columns between the data of two neighboring
  // lanes. Biases are stored in the order in which lanes read them.
  static constexpr int kColumnBytes = kHasKeyBias ? kKeyBiasBytes / kBlockKeys : kStatisticsBytes;
  static constexpr int kColumnsOfLane = kHasKeyBias ? kBlockKeys / 4 : 2;
  static constexpr int kSteps = kHeadDim / 16, kRowBytes = 2 * kHeadDim, kBlockBytes = kBlockKeys * kRowBytes;

  const RingParams& p;
  const RingAlong& along;
  RingBarriers<kLoads, kHasKeyBias>& barriers;
  std::uint32_t shared;
  Masks masks;
  std::uint32_t group_bytes;
  // Addresses at which the lane reads the warp's first block in the ring's first slot with ldmatrix. `across` is for
  // products that sum over head elements, and `along_rows` for products that sum over the block's columns.
  std::uint32_t across, along_rows;
  std::uint32_t statistics;  // address at which the lane reads the data of this block's columns
  RingPosition position;     // slot of the step's first slab

  CUTE_DEVICE std::uint32_t slot_offset(int slot) const { return slot * 2 * p.shape.array_bytes; }

  /// Returns the byte offset of a block, relative to the warp's first block. `block` is its index among the blocks
  /// whose masks are in registers.
  CUTE_DEVICE std::uint32_t block_offset(int block) const {
    return block % Masks::kInner * kBlockBytes + block / Masks::kInner * group_bytes;
  }

  /// Returns the address at which the lane reads the data of a block's columns. `slab` is the byte offset of the slab's
  /// slot, and `block` the byte offset of the block. `slab` is halved because it counts the bytes of two arrays.
  CUTE_DEVICE std::uint32_t statistics_of(std::uint32_t slab, std::uint32_t block) const {
    return statistics + (slab / 2 + block) / (kRowBytes / kColumnBytes);
  }

  /// Loads the warp's next tile from one array's buffer.
  CUTE_DEVICE RowOperand<Element, kHeadDim> load_tile(int array = 0) const {
    const int lane = threadIdx.x % 32, buffer = kTileArrays * ring_warp() + array;
    return RowOperand<Element, kHeadDim>::from_box(
        chunk_address<kHeadDim>(shared + p.shape.tiles + buffer * p.shape.tile_bytes, lane % 16, lane / 16));
  }

  /// Returns a word that depends on all ldmatrix instructions that loaded `rows`.
  CUTE_DEVICE static std::uint32_t loaded(const RowOperand<Element, kHeadDim>& rows) {
    std::uint32_t result = 0;
    CUTE_UNROLL
    for (int step = 0; step < kSteps; ++step) result |= rows.a[step].r[3];
    return result;
  }

  /// Releases the buffers of the warp's tile to the loader warps. `loaded` combines words from all loads of the tile.
  /// Without this data dependency, a tile's query gradients were once computed from two tiles: in one of 77 batch
  /// entries of 4 x 10 x 8 tokens, with windows of 4 x 5 x 8.
  CUTE_DEVICE void release_tile(std::uint32_t loaded) const {
    // ring_warp() comes before lanes diverge, because it shuffles. && would generate a branch, which costs more than &.
    std::uint64_t& has_room = barriers.has_room[ring_warp()];
    if (barriers.arrives() & loads_have_ended(loaded)) arrive_at(has_room);
  }

  /// Computes the products of a tile's rows with the columns of blocks. Accumulators start as `initial`. With `kAdds`,
  /// products are added to the values of `x` instead. Instructions with the same accumulators have to wait for each
  /// other. To hide this latency, instructions with different accumulators alternate.
  template <bool kAdds = false, int kCount>
  CUTE_DEVICE static void multiply_blocks(float (&x)[kCount][2][4], const RowOperand<Element, kHeadDim>& rows,
                                          const std::uint32_t (&addresses)[kCount], const float4& initial) {
    CUTE_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      std::uint32_t r[kCount][4];
      CUTE_UNROLL
      for (int b = 0; b < kCount; ++b) load_matrices(r[b], step_address(addresses[b], step));
      const auto a = rows(step);
      CUTE_UNROLL
      for (int i = 0; i < 2 * kCount; ++i) {
        const int b = i / 2, h = i % 2;
        float (&d)[4] = x[b][h];
        const float start[4] = {initial.x, initial.y, initial.z, initial.w};
        const float* const c = step > 0 || kAdds ? d : start;
        HalfInstruction<Element>::fma(d[0], d[1], d[2], d[3], a.r[0], a.r[1], a.r[2], a.r[3], r[b][2 * h],
                                      r[b][2 * h + 1], c[0], c[1], c[2], c[3]);
      }
    }
  }

  /// Multiplies weights by a block's columns, and adds the products to `o`.
  CUTE_DEVICE static void add_block(float (&o)[kHeadDim / 8][4], const std::uint32_t (&a)[4], std::uint32_t address) {
    CUTE_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      std::uint32_t r[4];
      load_matrices_transposed(r, step_address(address, step));
      CUTE_UNROLL
      for (int h = 0; h < 2; ++h) {
        float (&c)[4] = o[2 * step + h];
        HalfInstruction<Element>::fma(c[0], c[1], c[2], c[3], a[0], a[1], a[2], a[3], r[2 * h], r[2 * h + 1], c[0],
                                      c[1], c[2], c[3]);
      }
    }
  }

  /// Releases a slab, unless the next step sees it. `next_first` is the first slab of the next step.
  CUTE_DEVICE void release(int slab, int next_first, int slot) const {
    if (slab >= next_first) return;
    if (barriers.arrives()) arrive_at(barriers.empty[slot]);
  }

  /// Releases the slabs from `slab` to `end - 1` without reading them.
  CUTE_DEVICE void skip(int& slab, int end) {
    CUTE_NO_UNROLL
    for (; slab < end; ++slab) {
      wait_for(barriers.full[position.slot], position.parity);
      release(slab, end, position.slot);
      position.advance(p.shape.slots);
    }
  }

  /// Processes all steps of the warp. Calls functions of `worker` to enter a unit, start a step, add the visible part
  /// of each slab, finish the step and finish the unit.
  template <class Worker>
  CUTE_DEVICE void walk(Worker& worker) {
    const int adjacent = p.shape.adjacent[0] * p.shape.adjacent[1], sets = p.shape.warp_sets(),
              warp_set = ring_warp() / adjacent, lane = threadIdx.x % 32;
    int parity = 0, first_set = 0;  // parity of the tile's barriers; warp set that processes a unit's first step
    group_bytes = p.shape.group_blocks * kBlockBytes;
    for (int round = 0, number; (number = unit_of_round(p, round)) < p.units; ++round) {
      const RingUnit unit(p, number);
      masks.enter_strip(p, shared, unit, RingStrip<kRowsAreKeys>(p, unit));
      const std::uint32_t first_block = shared + masks.block * kBlockBytes;
      across = chunk_address<kHeadDim>(first_block, lane / 16 * 8 + lane % 8, lane / 8 % 2);
      along_rows = chunk_address<kHeadDim>(first_block, lane % 16, lane / 16);
      statistics = shared + p.shape.statistics + (masks.block * kBlockKeys + lane % 4 * kColumnsOfLane) * kColumnBytes;
      worker.enter(unit);
      int step = unit.step + warp_set - first_set, slab = along.step_slabs(unit.step).x;
      if (step < unit.step) step += sets;
      first_set = (first_set + unit.end - unit.step) % sets;
      [[maybe_unused]] const int end = along.step_slabs(unit.end - 1).y;
      int2 next = along.step_slabs(min(step, unit.end - 1));
      CUTE_NO_UNROLL
      for (; step < unit.end; step += sets) {
        const int2 slabs = next;
        // In the unit's last step, a warp releases all slabs.
        if constexpr (kHasSpareRegisters) {
          next = step + sets < unit.end ? along.step_slabs(step + sets) : make_int2(end, end);
        } else {
          next = along.step_slabs(min(step + sets, unit.end - 1));
          if (step + sets >= unit.end) next.x = next.y;
        }
        masks.enter_step(p, along, step);
        skip(slab, slabs.x);
        if constexpr (kTileArrays > 0) wait_for(barriers.has_tile[ring_warp()], parity);
        worker.start(unit, step, slabs);
        parity ^= 1;
        std::conditional_t<kHasSpareRegisters, RingPosition, RingPosition&> at = position;
        int current_slab = slabs.x;
        const auto add_slab = [&] {
          wait_for(barriers.full[at.slot], at.parity);
          worker.add(slot_offset(at.slot), masks.slab_mask(along.first_key(current_slab)));
        };
        const auto pass_slab = [&] {
          at.advance(p.shape.slots);
          if (kHasSpareRegisters && current_slab < next.x) position = at;
        };
        // A slab is released after a branch. In the basic block that multiplies the slab, ptxas would move the arrival
        // before products that wait for loads from the slab. It does not move products across a branch.
        if constexpr (kReleasesLate) {
          // The lane releases the slabs before slab `released`.
          const int released = barriers.is_arriving() ? next.x : slabs.x;
          bool was_last_use = false;
          int last_slot = 0;
          const auto release_last = [&] {
            barriers.sync_reads();
            if (was_last_use) arrive_at(barriers.empty[last_slot]);
          };
          CUTE_NO_UNROLL
          for (; current_slab < slabs.y; ++current_slab) {
            release_last();
            add_slab();
            was_last_use = current_slab < released;
            last_slot = at.slot;
            pass_slab();
          }
          release_last();
        } else if (current_slab < slabs.y) {
          CUTE_NO_UNROLL
          while (true) {
            add_slab();
            if (current_slab + 1 == slabs.y) break;
            release(current_slab, next.x, at.slot);
            pass_slab();
            ++current_slab;
          }
          release(current_slab, next.x, at.slot);
          pass_slab();
        }
        slab = min(next.x, slabs.y);
        if constexpr (!kHasSpareRegisters) position.retreat(slabs.y - slab, p.shape.slots);
        worker.finish(unit, step);
      }
      skip(slab, kHasSpareRegisters ? end : along.step_slabs(unit.end - 1).y);
      worker.finish_unit(unit);
    }
  }
};

}  // namespace natten_jax::small
