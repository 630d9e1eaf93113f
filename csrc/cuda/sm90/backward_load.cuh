// Work of the warps of the backward kernel that plan and load tiles.
#pragma once

#include "cuda/common/arithmetic.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/sm90/backward_traits.cuh"
#include "cuda/sm90/seams.cuh"

namespace natten_jax::sm90 {

constexpr int kPlannedAhead = 6;  // the next key/value tile is planned when this many query tiles are left to load

/// Prefetches a tile's keys and values to L2. They are later loaded to shared memory, when the previous tile is done.
template <class Traits>
CUTE_DEVICE void prefetch_key_tile(const BackwardParams& p, const KeyTilePlan<Traits::kKeys>& plan,
                                   const CUtensorMap* keys, const CUtensorMap* values) {
  const auto prefetch = [&](const CUtensorMap* map, int head_dim) {
    for (int chunk = 0; chunk < rows_of_head<kChunk>(head_dim); ++chunk) {
      SM90_TMA_LOAD_5D::PREFETCH::copy(map, chunk * kChunk, plan.kv_begin.z, plan.kv_begin.y, plan.kv_begin.x,
                                       plan.kv_slot);
    }
  };
  prefetch(keys, p.head_dim);
  prefetch(values, p.head_dim_v);
}

/// Takes the next position in the order of key/value tiles. Warp-collective.
CUTE_DEVICE int take_position(const BackwardParams& p, bool is_first) {
  if (is_first && p.schedule.starts_at_block()) return blockIdx.x;
  wait_for_previous_kernel();  // the previous kernel clears the counter of positions
  return p.schedule.take();
}

enum class Planned { kTile, kNothing, kEnd };

/// Plans the tile at a position of the order. If the position is past the last tile, the plan marks the end of the
/// tiles. Warp-collective.
template <class Traits>
CUTE_DEVICE Planned plan_position(const BackwardParams& p, typename Traits::SharedStorage& shared, int position,
                                  int slot) {
  auto& plan = shared.plan[slot];
  const bool is_end = position >= p.schedule.tiles;
  if (is_end) {
    allow_next_kernel();
    plan.q_tiles = -1;
  } else if (!plan_key_tile<Traits::kIsPlain>(p, shared.origins, shared.layout, p.schedule.tile_at(position), plan)) {
    return Planned::kNothing;
  }
  __syncwarp();
  arrive(shared.full_plan[slot]);  // every lane arrives, because every lane wrote a part of the plan
  if (!is_end && !plan.is_additional) plan_windows<Traits::kIsPlain>(p, shared.row_coordinates, plan);
  arrive(shared.full_windows[slot]);
  return is_end ? Planned::kEnd : Planned::kTile;
}

/// Loads a tile's keys and values to shared memory, according to its plan.
template <class Traits>
CUTE_DEVICE void load_key_tile(const BackwardParams& p, typename Traits::SharedStorage& shared,
                               const KeyTilePlan<Traits::kKeys>& plan, const CUtensorMap* keys,
                               const CUtensorMap* values) {
  const auto load = [&](const CUtensorMap* map, std::uint64_t& full, typename Traits::Element* tile, int head_dim) {
    const int chunks = rows_of_head<kChunk>(head_dim);
    constexpr int kRowBytes = kChunk * sizeof(typename Traits::Element);
    ClusterTransactionBarrier::arrive_and_expect_tx(&full, chunks * p.kv_tile_tokens * kRowBytes);
    load_tile<1>(map, &full, tile, chunks, Traits::kKeys, plan.kv_begin.z, plan.kv_begin.y, plan.kv_begin.x,
                 plan.kv_slot);
  };
  load(keys, shared.full_k, shared.k, p.head_dim);
  load(values, shared.full_v, shared.v, p.head_dim_v);
}

/// Plans all key/value tiles of the CTA and loads their keys and values. A tile is planned while the previous one is
/// still being processed. Runs in one warp. `planned` is the result of `plan_position` for the first tile, which the
/// caller has planned.
template <class Traits>
CUTE_DEVICE void plan_key_tiles(const BackwardParams& p, typename Traits::SharedStorage& shared, Planned planned) {
  Ring<2> slot;
  SingleBuffer wanted, kv;
  while (planned != Planned::kEnd) {
    if (planned == Planned::kTile) {
      const auto& plan = shared.plan[slot.index];
      if (threadIdx.x % 32 == 0) {
        const CUtensorMap *keys = &p.additional_keys, *values = &p.additional_values;
        if (!plan.is_additional) {
          keys = BackwardMaps::select_map(entry_maps<Traits>(p), p.key, kKeysOfEntry, plan.batch, plan.kv_map);
          values = BackwardMaps::select_map(entry_maps<Traits>(p), p.value, kValuesOfEntry, plan.batch, plan.kv_map);
          BackwardMaps::acquire(entry_maps<Traits>(p), kKeysOfEntry, plan.batch, plan.kv_map);
          BackwardMaps::acquire(entry_maps<Traits>(p), kValuesOfEntry, plan.batch, plan.kv_map);
        }
        prefetch_key_tile<Traits>(p, plan, keys, values);
        kv.wait_empty(shared.empty_kv);
        load_key_tile<Traits>(p, shared, plan, keys, values);
      }
      kv.advance();
      slot.advance();
      // Waits until the current tile is almost done. If CTAs took tiles earlier, the next tile would go to the CTA that
      // started its current tile first, not to the CTA that finishes first.
      wanted.wait_full(shared.wants_plan);
      wanted.advance();
    }
    const int position = take_position(p, false);
    slot.wait_empty(shared.empty_plan);
    planned = plan_position<Traits>(p, shared, position, slot.index);
  }
}

/// Waits for the plan in `slot`. Returns false if the plan marks the end of the tiles.
template <class Traits>
CUTE_DEVICE bool next_key_tile(typename Traits::SharedStorage& shared, const Ring<2>& slot) {
  slot.wait_full(shared.full_plan);
  return shared.plan[slot.index].q_tiles >= 0;
}

/// Loads the remainders of a query tile's logsumexps. Called only if some of the logsumexps are large. Warp-collective.
template <class Traits>
CUTE_DEVICE void load_remainders(const BackwardParams& p, typename Traits::SharedStorage& shared, int stage,
                                 const KeyTilePlan<Traits::kKeys>& plan, int head, int4 at) {
#pragma unroll 1
  for (int row = threadIdx.x % 32; row < Traits::kQueries; row += 32) {
    // Rows without a large logsumexp have a remainder of zero. They get the same weights as in tiles without
    // remainders.
    float remainder = 0.f;
    if (p.remainder != nullptr && has_remainder<typename Traits::Element>(shared.logsumexp[stage][row])) {
      const int token = query_token<Traits::kIsPlain>(p, plan, at, shared.column_coordinates[row]);
      const std::int64_t at = (static_cast<std::int64_t>(plan.batch) * p.queries + token) * p.heads + head;
      remainder = load_written(p.remainder + at);
    }
    shared.remainder[stage][row] = remainder;
  }
}

/// Loads a query tile of Q or dO, depending on `map`. The tile starts at `walk`, in query head `head`.
template <class Traits>
CUTE_DEVICE void load_query_tile(const BackwardParams& p, const KeyTilePlan<Traits::kKeys>& plan, const QueryWalk& walk,
                                 int head, const CUtensorMap* map, int head_dim, std::uint64_t& full,
                                 typename Traits::Element* to) {
  constexpr int kRowBytes = kChunk * sizeof(typename Traits::Element);
  const int chunks = rows_of_head<kChunk>(head_dim);
  ClusterTransactionBarrier::arrive_and_expect_tx(&full, chunks * p.q_tile_tokens * kRowBytes);
  const int slot = plan.query_slot + head;
  if (Traits::kIsPlain || !p.q_boxes.has_seams) {
    load_tile<Traits::kStages == 1 ? 4 : 1>(map, &full, to, chunks, Traits::kQueries, walk.z, walk.y, walk.x, slot);
    return;
  }
  for_boxes(p.q_boxes, p.axis, walk.x, walk.y, walk.z, !plan.is_additional, [&](int row, int x, int y, int z) {
    load_tile<1>(map, &full, to + row * kChunk, chunks, Traits::kQueries, z, y, x, slot);
  });
}

/// Loads the query tiles of dO, and of Q unless `kLoadsApart`, for all key/value tiles of the CTA. Runs in one thread.
template <class Traits>
CUTE_DEVICE void load_query_tiles(const BackwardParams& p, typename Traits::SharedStorage& shared) {
  // If tiles take turns in adding to dQ, the CTA does not take its next tile before the current tile is done. A tile
  // that is taken early would make the tiles with later turns wait until this CTA has finished its current tile.
  const int planned_ahead = p.schedule.additions == nullptr ? kPlannedAhead : 0;
  Ring<Traits::kStages> stage;
  for (Ring<2> slot; next_key_tile<Traits>(shared, slot); slot.advance()) {
    const auto& plan = shared.plan[slot.index];
    BackwardMaps::acquire(entry_maps<Traits>(p), kOutCotangentsOfEntry, plan.batch, plan.query_map);
    if (!Traits::kLoadsApart) BackwardMaps::acquire(entry_maps<Traits>(p), kQueriesOfEntry, plan.batch, plan.query_map);
    int remaining = plan.q_tiles * p.heads_per_kv;
    if (remaining < planned_ahead) arrive(shared.wants_plan);
    for (int i = 0; i < p.heads_per_kv; ++i) {
      QueryWalk walk(plan.hull_begin);
      for (int tile = 0; tile < plan.q_tiles; ++tile) {
        if (remaining-- == planned_ahead) arrive(shared.wants_plan);
        // Loads are issued in the order in which their buffers become free.
        stage.wait_empty(shared.empty_out_cotangent);
        const int head = plan.kv_head * p.heads_per_kv + i;
        load_query_tile<Traits>(p, plan, walk, head, plan.out_cotangents, p.head_dim_v,
                                shared.full_out_cotangent[stage.index], shared.out_cotangent[stage.index]);
        if constexpr (!Traits::kLoadsApart) {
          stage.wait_empty(shared.empty_q);
          load_query_tile<Traits>(p, plan, walk, head, plan.queries, p.head_dim, shared.full_q[stage.index],
                                  shared.q[stage.index]);
        }
        stage.advance();
        walk.next(p.axis, plan.hull_begin, plan.hull_end);
      }
    }
    if (planned_ahead == 0) arrive(shared.wants_plan);
    arrive(shared.empty_plan[slot.index]);
  }
}

/// Loads the logsumexps and deltas of the query tiles, and sets the flags of each tile. If `kLoadsApart`, also loads
/// the query tiles of Q. Runs in one warp.
///
/// Logsumexps and deltas have the same barriers as Q: with separate barriers, a pass took 2% longer (H200, 2-D, heads
/// of 128).
template <class Traits>
CUTE_DEVICE void load_statistics(const BackwardParams& p, typename Traits::SharedStorage& shared) {
  const int lane = threadIdx.x % 32;
  Ring<Traits::kStages> stage;
  for (Ring<2> slot; next_key_tile<Traits>(shared, slot); slot.advance()) {
    const auto& plan = shared.plan[slot.index];
    if (Traits::kLoadsApart) BackwardMaps::acquire(entry_maps<Traits>(p), kQueriesOfEntry, plan.batch, plan.query_map);
    for (int i = 0; i < p.heads_per_kv; ++i) {
      QueryWalk walk(plan.hull_begin);
      for (int tile = 0; tile < plan.q_tiles; ++tile) {
        const int head = plan.kv_head * p.heads_per_kv + i;
        // Loads to registers, because the buffers in shared memory may still be in use.
        float2 row_statistics[Traits::kQueries / 32];
        CUTE_UNROLL
        for (int r = 0; r < Traits::kQueries / 32; ++r) {
          const int row = lane + 32 * r;
          const int token = query_token<Traits::kIsPlain>(p, plan, walk.begin(), shared.column_coordinates[row]);
          const bool exists = row < p.q_tile_tokens && token >= 0;
          const std::int64_t at = static_cast<std::int64_t>(plan.batch * p.heads + head) * p.queries + token;
          row_statistics[r] = exists ? load_written(p.statistics + at) : make_float2(INFINITY, 0.f);
        }
        stage.wait_empty(shared.empty_q);
        if constexpr (Traits::kLoadsApart) {
          if (lane == 0) {
            load_query_tile<Traits>(p, plan, walk, head, plan.queries, p.head_dim, shared.full_q[stage.index],
                                    shared.q[stage.index]);
          }
          __syncwarp();
        }
        bool is_large = false;
        CUTE_UNROLL
        for (int r = 0; r < Traits::kQueries / 32; ++r) {
          // If all keys of a query are masked out, its logsumexp is -infinity. Infinity makes its weights zero.
          if (Traits::kHasKeyBias && row_statistics[r].x == -INFINITY) row_statistics[r].x = INFINITY;
          shared.logsumexp[stage.index][lane + 32 * r] = row_statistics[r].x;
          shared.delta[stage.index][lane + 32 * r] = row_statistics[r].y;
          is_large = is_large || has_remainder<typename Traits::Element>(row_statistics[r].x);
        }
        is_large = __any_sync(0xffffffffu, is_large);
        if (is_large) load_remainders<Traits>(p, shared, stage.index, plan, head, walk.begin());
        if (lane == 0) {
          const bool is_masked =
              !(p.kv_tile_tokens == Traits::kKeys && walk.is_inside(p.axis, plan.inner_begin, plan.inner_end));
          shared.tile[stage.index] =
              make_int4(walk.x, walk.y, walk.z, (is_masked ? kIsMasked : 0) | (is_large ? kIsLarge : 0));
        }
        arrive(shared.full_q[stage.index]);  // every lane arrives, because every lane wrote a part
        stage.advance();
        walk.next(p.axis, plan.hull_begin, plan.hull_end);
      }
    }
    arrive(shared.empty_plan[slot.index]);
  }
}

}  // namespace natten_jax::sm90
