// Main loops of the warps that move along a strip with a ring of slabs: TMA loader warps and compute warps.
#pragma once

#include "cuda/small/products.cuh"
#include "cuda/small/ring_barriers.cuh"
#include "cuda/small/ring_key_bias.cuh"
#include "cuda/small/ring_strip.cuh"
#include "cuda/tma/boxes.cuh"

namespace natten_jax::small {

/// Warps that issue TMA loads.
inline constexpr int kBoxLoaders = ring_loaders(RingLoads::kBoxes);

/// Main loop of a loader warp: it loads its part of each slab and of each step's tiles, in the order in which steps
/// need them. A single warp would issue a copy every 130 cycles, and a step needs up to 30 copies.
template <class Params, int kHeadDim>
CUTE_DEVICE void load_ring(const Params& p, const RingAlong& along, int warp, std::uint32_t shared,
                           RingBarriers<RingLoads::kBoxes, kLanesStore<Params>>& barriers) {
  // With key biases, all lanes store them and one lane issues TMA loads; otherwise only that lane runs this.
  constexpr bool kStores = kLanesStore<Params>;
  const bool is_loader = !kStores || threadIdx.x % 32 == 0;
  constexpr bool kOfKeys = Params::kKernel == Kernel::kKeyValueGradient;
  constexpr int kTileArrays = ring_tile_arrays(Params::kKernel);
  const RingShape& shape = p.shape;
  // The warp's array of slabs; it loads every second group of it.
  const int first_group = warp / 2;
  const bool is_second = warp % 2 != 0;
  const int groups = (shape.groups - first_group + 1) / 2, group_bytes = shape.group_blocks * kBlockKeys * 2 * kHeadDim;
  const CUtensorMap& map = is_second ? p.slabs[1] : p.slabs[0];
  const std::uint32_t tiles = shared + shape.tiles;
  // Statistics of queries are loaded along with the first array.
  const int statistics_bytes = kOfKeys && !is_second ? shape.group_blocks * kBlockKeys * kStatisticsBytes : 0;
  const std::uint32_t statistics = shared + shape.statistics + first_group * statistics_bytes;
  shared += first_group * group_bytes + (is_second ? shape.array_bytes : 0);
  [[maybe_unused]] const std::uint32_t first_bias = statistics;  // biases use the space of statistics
  [[maybe_unused]] RingKeyBiasLoader<Params> biases(p, warp);
  RingPlace place;
  int turn = 0;
  unsigned parities = 0;  // one bit per turn (RingShape::turns)
  for (int round = 0, number; (number = unit_of_round(p, round)) < p.units; ++round) {
    const RingUnit unit(p, number);
    const RingStrip<kOfKeys> strip(p, unit);
    const int head = unit.head * kHeadDim, head_kv = unit.head_kv(p) * kHeadDim;
    int loaded = along.of_step(unit.step).x;
    if constexpr (kStores) {
      biases.enter(unit, strip);
      biases.load(along.first_key(loaded));
    }
    for (int step = unit.step; step < unit.end; ++step) {
      if constexpr (kTileArrays > 0) {
        const int beside = shape.beside[0] * shape.beside[1];
        for (int i = warp; i < beside; i += kBoxLoaders) {
          const int reader = turn * beside + i;
          int row[kRank];
          first_row(p, unit, reader, row);
          std::uint64_t& full = barriers.has_tile[reader];
          wait(barriers.has_room[reader], (parities >> turn & 1) ^ 1);
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
        parities ^= 1u << turn;
        if (++turn == shape.turns()) turn = 0;
      }
      for (const int end = along.of_step(step).y; loaded < end; ++loaded) {
        std::uint64_t& full = barriers.full[place.slot];
        if constexpr (kStores) {
          biases.convert();
          biases.load(along.first_key(loaded + 1));
        }
        wait(barriers.empty[place.slot], place.parity ^ 1);
        if constexpr (kStores) {
          biases.store(first_bias + place.slot * shape.groups * shape.group_blocks * kKeyBiasBytes);
          arrive_at(full);
        }
        if (is_loader) {
          ClusterTransactionBarrier::arrive_and_expect_tx(&full, groups * (group_bytes + statistics_bytes));
          std::uint32_t to = shared + place.slot * 2 * shape.array_bytes;
          std::uint32_t statistics_to = statistics + place.slot * shape.groups * statistics_bytes;
          int across = strip.across + first_group * shape.wide;
          for (int group = 0; group < groups; ++group) {
            load_box(map, to, shared_address(&full), head_kv, across, strip.inside, along.first_key(loaded),
                     unit.batch);
            if constexpr (kOfKeys) {
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
        // Without this, lanes that run ahead would wait for room for the next slab, and block the lane that issues TMA
        // loads.
        if constexpr (kStores) __syncwarp();
        place.advance(shape.slots);
      }
    }
  }
}

/// Deferred steps of a unit, as a bit mask: a warp recomputes them after all other steps, because the main loop is
/// short of registers.
template <RingLoads kLoads>
class LateSteps {
 public:
  /// Adds a step, by its index in the unit.
  CUTE_DEVICE void add(int place) { places_ |= Places{1} << place; }

  /// Calls `call(place)` with the index of each deferred step, and clears the mask.
  template <class Call>
  CUTE_DEVICE void for_each(const Call& call) {
    CUTE_NO_UNROLL
    for (; places_ != 0; places_ &= places_ - 1) call(first());
  }

 private:
  using Places = std::conditional_t<most_segment_steps(kLoads) == 32, unsigned, unsigned long long>;

  CUTE_DEVICE int first() const {
    if constexpr (most_segment_steps(kLoads) == 32) return __ffs(places_) - 1;
    return __ffsll(places_) - 1;
  }

  Places places_ = 0;  // one bit per step
};

/// A compute warp: its read addresses and barriers.
template <class Element, int kHeadDim, class Params, class Masks, RingLoads kLoads>
struct RingReader {
  static constexpr bool kRowsAreKeys = Masks::kRowsAreKeys;
  static constexpr bool kHasKeyBias = kLanesStore<Params>;
  static constexpr int kTileArrays = ring_tile_arrays(Params::kKernel);
  /// Releases a slab at the start of the next loop iteration, not at the end of the current one. For 13x13 windows on
  /// 128x128 tokens, this changes the time on an H200 by -1.1% with heads of 64 and +2% with heads of 32. With key
  /// biases and heads of 64, it changes the time by -0.4% in the forward pass, but by +1.5% in the backward pass.
  static constexpr bool kReleasesLate = kHeadDim == 64 && !kHasKeyBias;
  /// Heads of 32 leave the warp without spare registers, so that cheap values are recomputed. Heads of 64 have fewer
  /// warps, which wait for the end of each step, and more registers.
  static constexpr bool kHasSpareRegisters = kHeadDim == 64;
  // Bytes of per-column data (statistics or key biases), and the number of columns between the data of two lanes.
  // Biases are stored in the order in which lanes read them.
  static constexpr int kColumnBytes = kHasKeyBias ? kKeyBiasBytes / kBlockKeys : kStatisticsBytes;
  static constexpr int kColumnsOfLane = kHasKeyBias ? kBlockKeys / 4 : 2;
  static constexpr int kSteps = kHeadDim / 16, kRowBytes = 2 * kHeadDim, kBlockBytes = kBlockKeys * kRowBytes;

  const RingParams& p;
  const RingAlong& along;
  RingBarriers<kLoads, kHasKeyBias>& barriers;
  std::uint32_t shared;
  Masks masks;
  std::uint32_t group_bytes;
  // The lane's ldmatrix addresses of the warp's first block in the ring's first slab: `across` for products that sum
  // over head elements, `along_rows` for products that sum over the block's rows.
  std::uint32_t across, along_rows;
  std::uint32_t statistics;  // the lane's address of the first slab's column statistics
  RingPlace place;           // slot of a step's first slab

  CUTE_DEVICE std::uint32_t of_slot(int slot) const { return slot * 2 * p.shape.array_bytes; }

  /// Returns the byte offset of a block, among the blocks whose masks the warp holds in registers.
  CUTE_DEVICE std::uint32_t of_block(int block) const {
    return block % Masks::kInner * kBlockBytes + block / Masks::kInner * group_bytes;
  }

  /// Returns the lane's address of the per-column data of a block, given the byte offsets of its slab and of the block.
  /// The slab's offset is halved because it counts two arrays.
  CUTE_DEVICE std::uint32_t statistics_of(std::uint32_t slab, std::uint32_t block) const {
    return statistics + (slab / 2 + block) / (kRowBytes / kColumnBytes);
  }

  /// Loads one array of the warp's next tile.
  CUTE_DEVICE RowOperand<Element, kHeadDim> load_tile(int array = 0) const {
    const int lane = threadIdx.x % 32, buffer = kTileArrays * ring_warp() + array;
    return RowOperand<Element, kHeadDim>::of_box(
        place_of_chunk<kHeadDim>(shared + p.shape.tiles + buffer * p.shape.tile_bytes, lane % 16, lane / 16));
  }

  /// Returns a word that depends on all ldmatrix loads of a tile.
  CUTE_DEVICE static std::uint32_t loaded(const RowOperand<Element, kHeadDim>& rows) {
    std::uint32_t result = 0;
    CUTE_UNROLL
    for (int step = 0; step < kSteps; ++step) result |= rows.a[step].r[3];
    return result;
  }

  /// Releases the tile's buffer to TMA. `loaded` combines words of all its loads: without this dependency the query
  /// gradients of a tile mixed two tiles in one of 77 batch entries of 4 x 10 x 8 tokens with windows of
  /// 4 x 5 x 8.
  CUTE_DEVICE void leave_tile(std::uint32_t loaded) const {
    std::uint64_t& has_room = barriers.has_room[ring_warp()];                // a shuffle: before lanes diverge
    if (barriers.arrives() & loads_have_ended(loaded)) arrive_at(has_room);  // not &&: a branch costs more
  }

  /// Computes the products of a tile's rows with the rows of blocks. Accumulators start as `initial`, or with `kAdds`
  /// keep their values. Instructions with the same accumulators are interleaved with the other blocks' to hide their
  /// latency.
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

  /// o += weights * a block's rows.
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

  /// Releases a slab that the next step does not see.
  CUTE_DEVICE void leave(int slab, int next_first, int slot) const {
    if (slab >= next_first) return;
    if (barriers.arrives()) arrive_at(barriers.empty[slot]);
  }

  /// Releases all slabs before `end` without reading them.
  CUTE_DEVICE void skip(int& slab, int end) {
    CUTE_NO_UNROLL
    for (; slab < end; ++slab) {
      wait_for(barriers.full[place.slot], place.parity);
      leave(slab, end, place.slot);
      place.advance(p.shape.slots);
    }
  }

  /// Processes all steps of the warp. It calls `own` to enter units, start steps, accumulate the visible part of each
  /// slab, finish steps and leave units.
  template <class Own>
  CUTE_DEVICE void walk(Own& own) {
    const int beside = p.shape.beside[0] * p.shape.beside[1], turns = p.shape.turns(), own_turn = ring_warp() / beside,
              lane = threadIdx.x % 32;
    int parity = 0, turn = 0;  // parity of the warp's tile barriers; the turn that takes a unit's first step
    group_bytes = p.shape.group_blocks * kBlockBytes;
    for (int round = 0, number; (number = unit_of_round(p, round)) < p.units; ++round) {
      const RingUnit unit(p, number);
      masks.enter_strip(p, shared, unit, RingStrip<kRowsAreKeys>(p, unit));
      const std::uint32_t first_block = shared + masks.block * kBlockBytes;
      across = place_of_chunk<kHeadDim>(first_block, lane / 16 * 8 + lane % 8, lane / 8 % 2);
      along_rows = place_of_chunk<kHeadDim>(first_block, lane % 16, lane / 16);
      statistics = shared + p.shape.statistics + (masks.block * kBlockKeys + lane % 4 * kColumnsOfLane) * kColumnBytes;
      own.enter(unit);
      int step = unit.step + own_turn - turn, slab = along.of_step(unit.step).x;
      if (step < unit.step) step += turns;
      turn = (turn + unit.end - unit.step) % turns;
      [[maybe_unused]] const int end = along.of_step(unit.end - 1).y;
      int2 next = along.of_step(min(step, unit.end - 1));
      CUTE_NO_UNROLL
      for (; step < unit.end; step += turns) {
        const int2 seen = next;
        // The unit's last step releases all slabs.
        if constexpr (kHasSpareRegisters) {
          next = step + turns < unit.end ? along.of_step(step + turns) : make_int2(end, end);
        } else {
          next = along.of_step(min(step + turns, unit.end - 1));
          if (step + turns >= unit.end) next.x = next.y;
        }
        masks.enter_step(p, along, step);
        skip(slab, seen.x);
        if constexpr (kTileArrays > 0) wait_for(barriers.has_tile[ring_warp()], parity);
        own.start(unit, step, seen);
        parity ^= 1;
        std::conditional_t<kHasSpareRegisters, RingPlace, RingPlace&> at = place;
        int of_slab = seen.x;
        const auto add_slab = [&] {
          wait_for(barriers.full[at.slot], at.parity);
          own.add(of_slot(at.slot), masks.of_slab(along.first_key(of_slab)));
        };
        const auto pass_slab = [&] {
          at.advance(p.shape.slots);
          if (kHasSpareRegisters && of_slab < next.x) place = at;
        };
        // A slab is released after a branch: inside the basic block that multiplies it, ptxas would schedule the
        // arrival before products that wait for loads from the slab. It does not move products across a branch.
        if constexpr (kReleasesLate) {
          const int released = barriers.is_arriving() ? next.x : seen.x;  // this lane releases the slabs before this
                                                                          // one
          bool was_last_use = false;
          int last_slot = 0;
          const auto release_last = [&] {
            barriers.meet();
            if (was_last_use) arrive_at(barriers.empty[last_slot]);
          };
          CUTE_NO_UNROLL
          for (; of_slab < seen.y; ++of_slab) {
            release_last();
            add_slab();
            was_last_use = of_slab < released;
            last_slot = at.slot;
            pass_slab();
          }
          release_last();
        } else if (of_slab < seen.y) {
          CUTE_NO_UNROLL
          while (true) {
            add_slab();
            if (of_slab + 1 == seen.y) break;
            leave(of_slab, next.x, at.slot);
            pass_slab();
            ++of_slab;
          }
          leave(of_slab, next.x, at.slot);
          pass_slab();
        }
        slab = min(next.x, seen.y);
        if constexpr (!kHasSpareRegisters) place.retreat(seen.y - slab, p.shape.slots);
        own.finish(unit, step);
      }
      skip(slab, kHasSpareRegisters ? end : along.of_step(unit.end - 1).y);
      own.leave_unit(unit);
    }
  }
};

}  // namespace natten_jax::small
