// The backward kernel's shared memory and the warps that move tiles: those that load, plan, add and store.
//
// One file, since what fills each buffer and what empties it walk over the same tiles and wait for the same barriers.
#pragma once

#include "cuda/common/arithmetic.cuh"
#include "cuda/common/column_mask.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/sm90/backward_plan.cuh"
#include "cuda/sm90/pipeline.cuh"

namespace natten_jax::sm90 {

constexpr int kConsumers = 256;  // threads of the two warpgroups that compute
constexpr int kThreads = 128 + kConsumers;
constexpr int kConsumerWarps = kConsumers / 32;
constexpr int kPlannedAhead = 6;  // query tiles that are still to be loaded when the next key/value tile is planned
// What is special about a query tile.
constexpr int kIsMasked = 1;   // some key is hidden from some query
constexpr int kIsLarge = 2;    // weights of some query need the remainder of its logsumexp
constexpr int kSumChunk = 32;  // elements of a 128-byte swizzled row of the query gradient's sums

// Named barriers; the first eight are CUTLASS's own.
constexpr int kTablesReady = 8;
constexpr int kScoresReady = 9;     // both warpgroups have written the gradients of their logits
constexpr int kScoresRead = 10;     // neither warpgroup reads them any more
constexpr int kGradientsDone = 11;  // both warpgroups have read what the gradients take the place of

template <class Element_, int kHeadDim_, int kKeys_, int kQueries_, int kStages_>
struct BackwardTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;  // at least head_dim and head_dim_v
  static constexpr int kKeys = kKeys_;        // keys of a tile
  static constexpr int kQueries = kQueries_;  // queries of a tile
  static constexpr int kStages = kStages_;
  // Whether the warpgroups own different keys, so that registers hold the operands of key and value gradients.
  static constexpr bool kSplitsKeys = kKeys == 128;
  // Whether one warpgroup computes a tile's query gradient and the other the next one's.
  static constexpr bool kAlternates = kHeadDim == 64;
  static constexpr int kScoreBuffers = kSplitsKeys ? 2 : 1;
  // The CTA is launched with 168 registers a thread, which are shared out anew.
  static constexpr int kMoverRegisters = kHeadDim == 64 ? 40 : 24;
  static constexpr int kConsumerRegisters = (168 * kThreads - 128 * kMoverRegisters) / kConsumers;

  // Tiles are [token][head_dim] or [key][query]; products read them in rows or, transposed, in columns.
  template <int kRows, int kColumns, int kBuffers>
  using Rows =
      decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<Element>{}, Shape<Int<kRows>, Int<kColumns>, Int<kBuffers>>{}));
  template <int kRows, int kColumns, int kBuffers>
  using Columns = decltype(tile_to_shape(GMMA::Layout_MN_SW128_Atom<Element>{},
                                         Shape<Int<kColumns>, Int<kRows>, Int<kBuffers>>{}, Step<_2, _1, _3>{}));

  static constexpr auto kv_product() {
    constexpr auto kRowsFirst = GMMA::Major::MN, kRowsLast = GMMA::Major::K;
    if constexpr (kSplitsKeys) {
      using Tile = Shape<_64, Int<kHeadDim>, Int<kQueries>>;
      return make_tiled_mma(GMMA::rs_op_selector<Element, Element, float, Tile, kRowsLast, kRowsFirst>());
    } else {
      using Tile = Shape<_64, Int<kHeadDim / 2>, Int<kQueries>>;
      return make_tiled_mma(GMMA::ss_op_selector<Element, Element, float, Tile, kRowsLast, kRowsFirst>());
    }
  }

  static_assert(2 * kKeys * kHeadDim <= kScoreBuffers * kKeys * kQueries + 2 * kQueries * kHeadDim);

  struct SharedStorage {
    alignas(1024) Element k[kKeys * kHeadDim];
    alignas(1024) Element v[kKeys * kHeadDim];
    alignas(1024) Element q[kStages][kQueries * kHeadDim];
    alignas(1024) Element out_cotangent[kStages][kQueries * kHeadDim];
    alignas(1024) Element weights[kSplitsKeys ? kChunk : kKeys * kQueries];
    alignas(1024) Element score_gradient[kScoreBuffers][kKeys * kQueries];
    alignas(1024) float query_gradient[kQueries * kHeadDim];
    KeyTilePlan<kKeys> plan[2];
    int4 tile[kStages];  // of the tile in a query buffer: first query (x, y, z), and bits of what is special about it
    alignas(16) float logsumexp[kStages][kQueries];  // in base 2; infinite where there is no query
    alignas(16) float remainder[kStages][kQueries];  // of the logsumexp, where the tile is large
    alignas(16) float delta[kStages][kQueries];
    uchar4 row_coordinates[kKeys];        // of a row in the key/value tile: x, y, z
    uchar4 column_coordinates[kQueries];  // of a column in the query tile
    Origin origins[6];
    std::uint32_t mask_words[QueryColumnMask::capacity(kQueries)];
    alignas(8) std::uint64_t full_k, full_v, empty_kv, full_gradients, empty_gradients;
    std::uint64_t full_sums, empty_sums, wants_plan;
    std::uint64_t full_plan[2], full_windows[2], empty_plan[2];
    std::uint64_t full_q[kStages], empty_q[kStages], full_out_cotangent[kStages], empty_out_cotangent[kStages];

    // Once a key/value tile is done, its gradients take the place of those of logits and query.
    CUTE_DEVICE Element* key_gradient() {
      return reinterpret_cast<Element*>(reinterpret_cast<char*>(this) + offsetof(SharedStorage, score_gradient));
    }
    CUTE_DEVICE Element* value_gradient() { return key_gradient() + kKeys * kHeadDim; }
  };
};

/// Brings a tile's keys and values into the second-level cache, which they come from once the tile before is done.
template <class Traits>
CUTE_DEVICE void prefetch_key_tile(const BackwardParams& p, const KeyTilePlan<Traits::kKeys>& plan) {
  const auto prefetch = [&](const CUtensorMap* map, int head_dim) {
    const int column = (plan.kv_token * p.heads_kv + plan.kv_head) * head_dim;
    for (int chunk = 0; chunk < head_dim / kChunk; ++chunk) {
      SM90_TMA_LOAD_5D::PREFETCH::copy(map, column + chunk * kChunk, plan.kv_begin.z, plan.kv_begin.y, plan.kv_begin.x,
                                       plan.batch);
    }
  };
  prefetch(plan.is_additional ? &p.additional_keys : &p.key[plan.kv_map], p.head_dim);
  prefetch(plan.is_additional ? &p.additional_values : &p.value[plan.kv_map], p.head_dim_v);
}

/// The next position in the order of key/value tiles. A tile waits only for others that were taken before it, so that
/// every CTA goes on; where tiles do not wait, a CTA need not ask for its first one.
CUTE_DEVICE int take_position(const BackwardParams& p, bool is_first) {
  if (is_first && p.turns == nullptr) return blockIdx.x;
  int position = 0;
  wait_for_previous_kernel();
  if (threadIdx.x % 32 == 0) position = atomicAdd(p.next_tile, 1);
  return of_lane(position, 0) + (p.turns == nullptr ? gridDim.x : p.first_taken);
}

enum class Planned { kTile, kNothing, kEnd };

/// Plans the tile at a position of the order, or says that there are no more; all lanes of a warp.
template <class Traits>
CUTE_DEVICE Planned plan_position(const BackwardParams& p, typename Traits::SharedStorage& shared, int position,
                                  int slot) {
  auto& plan = shared.plan[slot];
  const bool is_end = position >= p.tiles;
  if (is_end) {
    allow_next_kernel();
    plan.q_tiles = -1;
  } else if (!plan_key_tile(p, shared.origins, p.is_sorted ? p.order[position] : position, plan)) {
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
  int slot = 0, phase = 0, wanted_phase = 0;
  while (planned != Planned::kEnd) {
    if (planned == Planned::kTile) {
      advance<2>(slot, phase);
      // Taking the next tile early would leave it to whichever CTA started first, not to the one done first.
      wait(shared.wants_plan, wanted_phase);
      wanted_phase ^= 1;
    }
    const int position = take_position(p, false);
    wait(shared.empty_plan[slot], phase ^ 1);
    planned = plan_position<Traits>(p, shared, position, slot);
    if (planned == Planned::kTile && threadIdx.x % 32 == 0) prefetch_key_tile<Traits>(p, shared.plan[slot]);
  }
}

/// One warp: loads the key tile and the query tiles of every query head, with their logsumexp and delta.
template <class Traits>
CUTE_DEVICE void load_queries(const BackwardParams& p, typename Traits::SharedStorage& shared) {
  using Element = typename Traits::Element;
  constexpr int kRowBytes = kChunk * sizeof(Element);
  const int lane = threadIdx.x % 32, chunks = p.head_dim / kChunk;
  // Where tiles take turns, those that are taken early would keep others waiting.
  const int planned_ahead = p.turns == nullptr ? kPlannedAhead : 0;
  int stage = 0, phase = 0, kv_phase = 0, slot = 0, plan_phase = 0;
  while (true) {
    wait(shared.full_plan[slot], plan_phase);
    const auto& plan = shared.plan[slot];
    if (plan.q_tiles < 0) return;
    wait(shared.empty_kv, kv_phase ^ 1);
    kv_phase ^= 1;
    if (lane == 0) {
      const int rows = plan.is_additional ? Traits::kKeys : p.kv_tile_tokens;
      ClusterTransactionBarrier::arrive_and_expect_tx(&shared.full_k, chunks * rows * kRowBytes);
      load_tile(plan.is_additional ? &p.additional_keys : &p.key[plan.kv_map], &shared.full_k, shared.k, chunks,
                Traits::kKeys, (plan.kv_token * p.heads_kv + plan.kv_head) * p.head_dim, plan.kv_begin.z,
                plan.kv_begin.y, plan.kv_begin.x, plan.batch);
    }
    const CUtensorMap* map = &p.query[plan.query_map];
    const bool is_whole = plan.is_additional || p.kv_tile_tokens == Traits::kKeys;
    const int4 hull_begin = plan.hull_begin, hull_end = plan.hull_end;
    int remaining = plan.q_tiles * p.heads_per_kv;
    if (remaining < planned_ahead && lane == 0) arrive(shared.wants_plan);
    for (int i = 0; i < p.heads_per_kv; ++i) {
      const int head = plan.kv_head * p.heads_per_kv + i;
      const int column = (plan.q_token * p.heads + head) * p.head_dim;
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
        wait(shared.empty_q[stage], phase ^ 1);
        if (lane == 0) {
          ClusterTransactionBarrier::arrive_and_expect_tx(&shared.full_q[stage], chunks * p.q_tile_tokens * kRowBytes);
          load_tile(map, &shared.full_q[stage], shared.q[stage], chunks, Traits::kQueries, column, walk.z, walk.y,
                    walk.x, plan.batch);
        }
        bool is_large = false;
        CUTE_UNROLL
        for (int i = 0; i < Traits::kQueries / 32; ++i) {
          shared.logsumexp[stage][lane + 32 * i] = of_rows[i].x;
          shared.delta[stage][lane + 32 * i] = of_rows[i].y;
          is_large = is_large || has_remainder<Element>(of_rows[i].x);
        }
        is_large = __any_sync(0xffffffffu, is_large);
        if (is_large) {
          for (int row = lane; row < Traits::kQueries; row += 32) {
            float remainder = 0.f;  // rows without one are as they would be in another tile
            if (p.remainder != nullptr && has_remainder<Element>(shared.logsumexp[stage][row])) {
              const int4 at = make_int4(walk.x, walk.y, walk.z, 0);
              const int token = query_token(p, plan, at, shared.column_coordinates[row]);
              remainder = p.remainder[(static_cast<std::int64_t>(plan.batch) * p.queries + token) * p.heads + head];
            }
            shared.remainder[stage][row] = remainder;
          }
        }
        if (lane == 0) {
          const bool is_masked = !(is_whole && walk.is_inside(p.axis, plan.inner_begin, plan.inner_end));
          shared.tile[stage] =
              make_int4(walk.x, walk.y, walk.z, (is_masked ? kIsMasked : 0) | (is_large ? kIsLarge : 0));
        }
        arrive(shared.full_q[stage]);  // every lane wrote a part
        advance<Traits::kStages>(stage, phase);
        walk.next(p.axis, hull_begin, hull_end);
      }
    }
    if (planned_ahead == 0 && lane == 0) arrive(shared.wants_plan);
    arrive(shared.empty_plan[slot]);
    advance<2>(slot, plan_phase);
  }
}

/// One thread: loads the value tile and the output cotangent's tiles of every query head.
template <class Traits>
CUTE_DEVICE void load_out_cotangents(const BackwardParams& p, typename Traits::SharedStorage& shared) {
  constexpr int kRowBytes = kChunk * sizeof(typename Traits::Element);
  const int chunks = p.head_dim_v / kChunk;
  int stage = 0, phase = 0, kv_phase = 0, slot = 0, plan_phase = 0;
  while (true) {
    wait(shared.full_plan[slot], plan_phase);
    const auto& plan = shared.plan[slot];
    if (plan.q_tiles < 0) return;
    wait(shared.empty_kv, kv_phase ^ 1);
    kv_phase ^= 1;
    const int rows = plan.is_additional ? Traits::kKeys : p.kv_tile_tokens;
    ClusterTransactionBarrier::arrive_and_expect_tx(&shared.full_v, chunks * rows * kRowBytes);
    load_tile(plan.is_additional ? &p.additional_values : &p.value[plan.kv_map], &shared.full_v, shared.v, chunks,
              Traits::kKeys, (plan.kv_token * p.heads_kv + plan.kv_head) * p.head_dim_v, plan.kv_begin.z,
              plan.kv_begin.y, plan.kv_begin.x, plan.batch);
    const CUtensorMap* map = &p.out_cotangent[plan.query_map];
    const int4 hull_begin = plan.hull_begin, hull_end = plan.hull_end;
    for (int i = 0; i < p.heads_per_kv; ++i) {
      const int head = plan.kv_head * p.heads_per_kv + i;
      const int column = (plan.q_token * p.heads + head) * p.head_dim_v;
      QueryWalk walk(hull_begin);
      for (int tile = 0; tile < plan.q_tiles; ++tile) {
        wait(shared.empty_out_cotangent[stage], phase ^ 1);
        ClusterTransactionBarrier::arrive_and_expect_tx(&shared.full_out_cotangent[stage],
                                                        chunks * p.q_tile_tokens * kRowBytes);
        load_tile(map, &shared.full_out_cotangent[stage], shared.out_cotangent[stage], chunks, Traits::kQueries, column,
                  walk.z, walk.y, walk.x, plan.batch);
        advance<Traits::kStages>(stage, phase);
        walk.next(p.axis, hull_begin, hull_end);
      }
    }
    arrive(shared.empty_plan[slot]);
    advance<2>(slot, plan_phase);
  }
}

// What the copy engine adds never passes through the caches of a multiprocessor: reading and writing these counters
// before and after it needs no fence, only that it is done. That is how GPUs of compute capability 9.0 work. The PTX
// memory model promises less: by it, the sums of two CTAs are ordered where the one counts with red.release.gpu after
// it has waited for its sums, and the other looks with ld.acquire.gpu and then, as the copy engine is another proxy,
// executes fence.proxy.async before it adds.
CUTE_DEVICE std::int32_t load_count(const std::int32_t* turns) {
  std::int32_t count;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(count) : "l"(turns) : "memory");
  return count;
}
CUTE_DEVICE void count_one(std::int32_t* turns) {
  asm volatile("red.relaxed.gpu.global.add.s32 [%0], 1;" ::"l"(turns) : "memory");
}

/// Adds the sums that lie in shared memory to a query tile's.
template <class Traits>
CUTE_DEVICE void add_sums(const BackwardParams& p, typename Traits::SharedStorage& shared, const CUtensorMap* map,
                          int q_token, int row, const QueryWalk& at) {
  for (int chunk = 0; chunk < p.head_dim / kSumChunk; ++chunk) {
    SM90_TMA_REDUCE_ADD_5D::copy(map, shared.query_gradient + chunk * Traits::kQueries * kSumChunk,
                                 q_token * p.head_dim + chunk * kSumChunk, at.z, at.y, at.x, row);
  }
  tma_store_arrive();
}

/// Stores a tile's key and value gradients from shared memory.
template <class Traits>
CUTE_DEVICE void store_key_tile(const BackwardParams& p, typename Traits::SharedStorage& shared,
                                const KeyTilePlan<Traits::kKeys>& plan) {
  const auto store = [&](const CUtensorMap* to, const typename Traits::Element* tile, int head_dim) {
    const int column = (plan.kv_token * p.heads_kv + plan.kv_head) * head_dim;
    for (int chunk = 0; chunk < head_dim / kChunk; ++chunk) {
      SM90_TMA_STORE_5D::copy(to, tile + chunk * Traits::kKeys * kChunk, column + chunk * kChunk, plan.kv_begin.z,
                              plan.kv_begin.y, plan.kv_begin.x, plan.batch);
    }
  };
  store(plan.is_additional ? &p.additional_keys_gradient : &p.key_gradient[plan.kv_map], shared.key_gradient(),
        p.head_dim);
  store(plan.is_additional ? &p.additional_values_gradient : &p.value_gradient[plan.kv_map], shared.value_gradient(),
        p.head_dim_v);
  tma_store_arrive();
  tma_store_wait<0>();
  arrive(shared.empty_gradients);
}

/// One thread: adds query gradients to their sums and stores key and value gradients; what lies outside the layout is
/// clipped.
template <class Traits>
CUTE_DEVICE void store_gradients(const BackwardParams& p, typename Traits::SharedStorage& shared) {
  wait_for_previous_kernel();
  int sums_phase = 0, gradients_phase = 0, slot = 0, plan_phase = 0;
  while (true) {
    wait(shared.full_plan[slot], plan_phase);
    const auto& plan = shared.plan[slot];
    if (plan.q_tiles < 0) return;
    const CUtensorMap* map = &p.query_gradient[plan.query_map];
    const int4 hull_begin = plan.hull_begin, hull_end = plan.hull_end;
    for (int i = 0; i < p.heads_per_kv; ++i) {
      const int row = plan.batch * p.heads + plan.kv_head * p.heads_per_kv + i;
      QueryWalk walk(hull_begin);
      for (int tile = 0; tile < plan.q_tiles; ++tile) {
        wait(shared.full_sums, sums_phase);
        sums_phase ^= 1;
        add_sums<Traits>(p, shared, map, plan.q_token, row, walk);
        tma_store_wait<0>();
        arrive(shared.empty_sums);
        walk.next(p.axis, hull_begin, hull_end);
      }
    }
    wait(shared.full_gradients, gradients_phase);
    gradients_phase ^= 1;
    store_key_tile<Traits>(p, shared, plan);
    arrive(shared.empty_plan[slot]);
    advance<2>(slot, plan_phase);
  }
}

/// One warp: the same, but key/value tiles take turns in adding to a query tile, so that every run rounds alike.
template <class Traits>
CUTE_DEVICE void store_gradients_in_turns(const BackwardParams& p, typename Traits::SharedStorage& shared) {
  wait_for_previous_kernel();
  const int lane = threadIdx.x % 32;
  int sums_phase = 0, gradients_phase = 0, slot = 0, plan_phase = 0;
  while (true) {
    wait(shared.full_plan[slot], plan_phase);
    const auto& plan = shared.plan[slot];
    if (plan.q_tiles < 0) return;
    const CUtensorMap* map = &p.query_gradient[plan.query_map];
    const int4 hull_begin = plan.hull_begin, hull_end = plan.hull_end;
    for (int i = 0; i < p.heads_per_kv; ++i) {
      const int row = plan.batch * p.heads + plan.kv_head * p.heads_per_kv + i;
      std::int32_t* turns = p.turns + (static_cast<std::int64_t>(row) * p.groups + plan.group) * p.q_tiles;
      QueryWalk walk(hull_begin);
      Turn turn = turn_of(p, plan, walk);
      std::int32_t count = -1;
      for (int tile = 0; tile < plan.q_tiles; ++tile) {
        std::int32_t* const turns_here = turns + turn.q_tile;
        if (lane == 0) {
          while (count != turn.before) count = load_count(turns_here);
          wait(shared.full_sums, sums_phase);
          add_sums<Traits>(p, shared, map, plan.q_token, row, walk);
        }
        __syncwarp();
        sums_phase ^= 1;
        walk.next(p.axis, hull_begin, hull_end);
        turn = turn_of(p, plan, walk);
        if (lane == 0) {
          tma_store_wait<0>();
          arrive(shared.empty_sums);
          // On its way while this tile's sums are.
          count = tile + 1 < plan.q_tiles ? load_count(turns + turn.q_tile) : -1;
          asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
          count_one(turns_here);
        }
      }
    }
    if (lane == 0) {
      wait(shared.full_gradients, gradients_phase);
      store_key_tile<Traits>(p, shared, plan);
    }
    __syncwarp();
    gradients_phase ^= 1;
    arrive(shared.empty_plan[slot]);
    advance<2>(slot, plan_phase);
  }
}

}  // namespace natten_jax::sm90
