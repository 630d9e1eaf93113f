// The warps of the backward kernel that plan and load tiles.
#pragma once

#include "cuda/common/arithmetic.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/sm90/backward_traits.cuh"

namespace natten_jax::sm90 {

constexpr int kPlannedAhead = 6;  // query tiles that are still to be loaded when the next key/value tile is planned

/// Brings a tile's keys and values into the second-level cache, which they come from once the tile before is done.
template <class Traits>
CUTE_DEVICE void prefetch_key_tile(const BackwardParams& p, const KeyTilePlan<Traits::kKeys>& plan) {
  const auto prefetch = [&](const CUtensorMap* map, int head_dim) {
    for (int chunk = 0; chunk < rows_of_head<kChunk>(head_dim); ++chunk) {
      SM90_TMA_LOAD_5D::PREFETCH::copy(map, chunk * kChunk, plan.kv_begin.z, plan.kv_begin.y, plan.kv_begin.x,
                                       plan.kv_slot);
    }
  };
  prefetch(plan.is_additional ? &p.additional_keys : &p.key[plan.kv_map], p.head_dim);
  prefetch(plan.is_additional ? &p.additional_values : &p.value[plan.kv_map], p.head_dim_v);
}

/// The next position in the order of key/value tiles; all lanes of a warp take part.
CUTE_DEVICE int take_position(const BackwardParams& p, bool is_first) {
  if (is_first && p.schedule.starts_at_block()) return blockIdx.x;
  wait_for_previous_kernel();  // which clears the counter
  return p.schedule.take();
}

enum class Planned { kTile, kNothing, kEnd };

/// Plans the tile at a position of the order, or says that there are no more; all lanes of a warp.
template <class Traits>
CUTE_DEVICE Planned plan_position(const BackwardParams& p, typename Traits::SharedStorage& shared, int position,
                                  int slot) {
  auto& plan = shared.plan[slot];
  const bool is_end = position >= p.schedule.tiles;
  if (is_end) {
    allow_next_kernel();
    plan.q_tiles = -1;
  } else if (!plan_key_tile(p, shared.origins, p.schedule.tile_at(position), plan)) {
    return Planned::kNothing;
  }
  __syncwarp();
  arrive(shared.full_plan[slot]);  // every lane wrote a part
  if (!is_end && !plan.is_additional) plan_windows(p, shared.row_coordinates, plan);
  arrive(shared.full_windows[slot]);
  return is_end ? Planned::kEnd : Planned::kTile;
}

/// One warp: plans tiles ahead of the loads and the products; `planned` says what the first one was.
template <class Traits>
CUTE_DEVICE void plan_key_tiles(const BackwardParams& p, typename Traits::SharedStorage& shared, Planned planned) {
  Ring<2> slot;
  SingleBuffer wanted;
  while (planned != Planned::kEnd) {
    if (planned == Planned::kTile) {
      slot.advance();
      // Taking the next tile early would leave it to whichever CTA started first, not to the one done first.
      wanted.wait_full(shared.wants_plan);
      wanted.advance();
    }
    const int position = take_position(p, false);
    slot.wait_empty(shared.empty_plan);
    planned = plan_position<Traits>(p, shared, position, slot.index);
    if (planned == Planned::kTile && threadIdx.x % 32 == 0) prefetch_key_tile<Traits>(p, shared.plan[slot.index]);
  }
}

/// Waits for the plan in `slot` and for the buffers that `kv` stands for, and loads the plan's key or value tile; false
/// where there are no more tiles. A warp loads keys, one thread values.
template <class Traits, bool kIsKey>
CUTE_DEVICE bool start_key_tile(const BackwardParams& p, typename Traits::SharedStorage& shared, const Ring<2>& slot,
                                SingleBuffer& kv) {
  slot.wait_full(shared.full_plan);
  const auto& plan = shared.plan[slot.index];
  if (plan.q_tiles < 0) return false;
  kv.wait_empty(shared.empty_kv);
  kv.advance();
  if (kIsKey && threadIdx.x % 32 != 0) return true;
  auto& full = kIsKey ? shared.full_k : shared.full_v;
  const CUtensorMap* map = kIsKey ? &p.key[plan.kv_map] : &p.value[plan.kv_map];
  const CUtensorMap* additional_map = kIsKey ? &p.additional_keys : &p.additional_values;
  const int chunks = rows_of_head<kChunk>(kIsKey ? p.head_dim : p.head_dim_v);
  const int rows = plan.is_additional ? Traits::kKeys : p.kv_tile_tokens;
  constexpr int kRowBytes = kChunk * sizeof(typename Traits::Element);
  ClusterTransactionBarrier::arrive_and_expect_tx(&full, chunks * rows * kRowBytes);
  load_tile(plan.is_additional ? additional_map : map, &full, kIsKey ? shared.k : shared.v, chunks, Traits::kKeys,
            plan.kv_begin.z, plan.kv_begin.y, plan.kv_begin.x, plan.kv_slot);
  return true;
}

/// One warp: loads the key tile and the query tiles of every query head, with their logsumexp and delta.
template <class Traits>
CUTE_DEVICE void load_queries(const BackwardParams& p, typename Traits::SharedStorage& shared) {
  using Element = typename Traits::Element;
  constexpr int kRowBytes = kChunk * sizeof(Element);
  const int lane = threadIdx.x % 32, chunks = rows_of_head<kChunk>(p.head_dim);
  // Where tiles take turns, those that are taken early would keep others waiting.
  const int planned_ahead = p.schedule.turns == nullptr ? kPlannedAhead : 0;
  Ring<Traits::kStages> stage;
  SingleBuffer kv;
  Ring<2> slot;
  while (true) {
    if (!start_key_tile<Traits, true>(p, shared, slot, kv)) return;
    const auto& plan = shared.plan[slot.index];
    const CUtensorMap* map = &p.query[plan.query_map];
    const bool is_whole = plan.is_additional || p.kv_tile_tokens == Traits::kKeys;
    const int4 hull_begin = plan.hull_begin, hull_end = plan.hull_end;
    int remaining = plan.q_tiles * p.heads_per_kv;
    if (remaining < planned_ahead && lane == 0) arrive(shared.wants_plan);
    for (int i = 0; i < p.heads_per_kv; ++i) {
      const int head = plan.kv_head * p.heads_per_kv + i;
      const int query_slot = plan.query_slot + head;
      const float2* statistics = p.statistics + static_cast<std::int64_t>(plan.batch * p.heads + head) * p.queries;
      QueryWalk walk(hull_begin);
      for (int tile = 0; tile < plan.q_tiles; ++tile) {
        if (remaining-- == planned_ahead && lane == 0) arrive(shared.wants_plan);
        // On their way while the buffers are still in use.
        float2 of_rows[Traits::kQueries / 32];
        CUTE_UNROLL
        for (int i = 0; i < Traits::kQueries / 32; ++i) {
          const int row = lane + 32 * i;
          const int token = query_token(p, plan, make_int4(walk.x, walk.y, walk.z, 0), shared.column_coordinates[row]);
          const bool exists = row < p.q_tile_tokens && token >= 0;
          of_rows[i] = exists ? statistics[token] : make_float2(INFINITY, 0.f);
        }
        stage.wait_empty(shared.empty_q);
        if (lane == 0) {
          ClusterTransactionBarrier::arrive_and_expect_tx(&shared.full_q[stage.index],
                                                          chunks * p.q_tile_tokens * kRowBytes);
          load_tile(map, &shared.full_q[stage.index], shared.q[stage.index], chunks, Traits::kQueries, walk.z, walk.y,
                    walk.x, query_slot);
        }
        bool is_large = false;
        CUTE_UNROLL
        for (int i = 0; i < Traits::kQueries / 32; ++i) {
          shared.logsumexp[stage.index][lane + 32 * i] = of_rows[i].x;
          shared.delta[stage.index][lane + 32 * i] = of_rows[i].y;
          is_large = is_large || has_remainder<Element>(of_rows[i].x);
        }
        is_large = __any_sync(0xffffffffu, is_large);
        if (is_large) {
          for (int row = lane; row < Traits::kQueries; row += 32) {
            float remainder = 0.f;  // rows without one are as they would be in another tile
            if (p.remainder != nullptr && has_remainder<Element>(shared.logsumexp[stage.index][row])) {
              const int4 at = make_int4(walk.x, walk.y, walk.z, 0);
              const int token = query_token(p, plan, at, shared.column_coordinates[row]);
              remainder = p.remainder[(static_cast<std::int64_t>(plan.batch) * p.queries + token) * p.heads + head];
            }
            shared.remainder[stage.index][row] = remainder;
          }
        }
        if (lane == 0) {
          const bool is_masked = !(is_whole && walk.is_inside(p.axis, plan.inner_begin, plan.inner_end));
          shared.tile[stage.index] =
              make_int4(walk.x, walk.y, walk.z, (is_masked ? kIsMasked : 0) | (is_large ? kIsLarge : 0));
        }
        arrive(shared.full_q[stage.index]);  // every lane wrote a part
        stage.advance();
        walk.next(p.axis, hull_begin, hull_end);
      }
    }
    if (planned_ahead == 0 && lane == 0) arrive(shared.wants_plan);
    arrive(shared.empty_plan[slot.index]);
    slot.advance();
  }
}

/// One thread: loads the value tile and the output cotangent's tiles of every query head.
template <class Traits>
CUTE_DEVICE void load_out_cotangents(const BackwardParams& p, typename Traits::SharedStorage& shared) {
  constexpr int kRowBytes = kChunk * sizeof(typename Traits::Element);
  const int chunks = rows_of_head<kChunk>(p.head_dim_v);
  Ring<Traits::kStages> stage;
  SingleBuffer kv;
  Ring<2> slot;
  while (true) {
    if (!start_key_tile<Traits, false>(p, shared, slot, kv)) return;
    const auto& plan = shared.plan[slot.index];
    const CUtensorMap* map = &p.out_cotangent[plan.query_map];
    const int4 hull_begin = plan.hull_begin, hull_end = plan.hull_end;
    for (int i = 0; i < p.heads_per_kv; ++i) {
      const int head = plan.kv_head * p.heads_per_kv + i;
      const int query_slot = plan.query_slot + head;
      QueryWalk walk(hull_begin);
      for (int tile = 0; tile < plan.q_tiles; ++tile) {
        stage.wait_empty(shared.empty_out_cotangent);
        ClusterTransactionBarrier::arrive_and_expect_tx(&shared.full_out_cotangent[stage.index],
                                                        chunks * p.q_tile_tokens * kRowBytes);
        load_tile(map, &shared.full_out_cotangent[stage.index], shared.out_cotangent[stage.index], chunks,
                  Traits::kQueries, walk.z, walk.y, walk.x, query_slot);
        stage.advance();
        walk.next(p.axis, hull_begin, hull_end);
      }
    }
    arrive(shared.empty_plan[slot.index]);
    slot.advance();
  }
}

}  // namespace natten_jax::sm90
