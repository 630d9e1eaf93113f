// Work of the warp of the backward kernel that adds dQ to sums in global memory and stores dK and dV.
#pragma once

#include "cuda/common/launch.cuh"
#include "cuda/sm90/backward_traits.cuh"
#include "cuda/sm90/seams.cuh"

namespace natten_jax::sm90 {

// Synchronization of CTAs that take turns in adding to the same sums, in terms of the PTX memory model. The first CTA
// waits until TMA has added its dQ, which makes the new sums visible to the waiting thread. It then increments the
// count with a release operation. The next CTA reads the count until it has the expected value. An acquire fence then
// makes the new sums visible to this CTA. A second fence makes them visible to TMA, which adds in the async proxy.
CUTE_DEVICE std::int32_t load_count(const std::int32_t* counter) {
  std::int32_t count;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(count) : "l"(counter) : "memory");
  return count;
}
/// Waits until the count is `expected`. `count` is its most recently read value. After the acquire fence, the writes of
/// all CTAs that have incremented the count are visible.
CUTE_DEVICE void await_count(const std::int32_t* counter, std::int32_t expected, std::int32_t count) {
  while (count != expected) count = load_count(counter);
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
/// Increments the count with a release operation. This publishes the bulk copies for which the thread has waited.
CUTE_DEVICE void count_one(std::int32_t* counter) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}

/// Adds the dQ tile in shared memory to the sums of a query tile in global memory, with TMA.
template <class Traits>
CUTE_DEVICE void add_sums(const BackwardParams& p, typename Traits::SharedStorage& shared, const CUtensorMap* map,
                          int slot, bool is_additional, const QueryWalk& at) {
  const auto add = [&](int row, int x, int y, int z) {
    for (int chunk = 0; chunk < rows_of_head<kSumChunk>(p.head_dim); ++chunk) {
      SM90_TMA_REDUCE_ADD_5D::copy(map, shared.query_gradient + (chunk * Traits::kQueries + row) * kSumChunk,
                                   chunk * kSumChunk, z, y, x, slot);
    }
  };
  if (Traits::kIsPlain || !p.q_boxes.has_seams) {
    add(0, at.x, at.y, at.z);
  } else {
    for_boxes(p.q_boxes, p.axis, at.x, at.y, at.z, !is_additional, add);
  }
  tma_store_arrive();
}

/// Copies a tile's dK and dV from shared to global memory, with TMA.
template <class Traits>
CUTE_DEVICE void store_key_tile(const BackwardParams& p, typename Traits::SharedStorage& shared,
                                const KeyTilePlan<Traits::kKeys>& plan, const CUtensorMap* keys,
                                const CUtensorMap* values) {
  const auto store = [&](const CUtensorMap* to, const typename Traits::Element* tile, int head_dim) {
    for (int chunk = 0; chunk < rows_of_head<kChunk>(head_dim); ++chunk) {
      SM90_TMA_STORE_5D::copy(to, tile + chunk * Traits::kKeys * kChunk, chunk * kChunk, plan.kv_begin.z,
                              plan.kv_begin.y, plan.kv_begin.x, plan.kv_slot);
    }
  };
  store(keys, shared.key_gradient(), p.head_dim);
  store(values, shared.value_gradient(), p.head_dim_v);
  tma_store_arrive();
  tma_store_wait<0>();
  arrive(shared.empty_gradients);
}

/// Adds dQ tiles to the sums and stores dK and dV. TMA does not write elements outside of the layout.
///
/// Runs in one thread. If `kIsOrdered`, runs in one warp, which computes the order collectively. Key/value tiles then
/// add to a query tile in a fixed order, so that rounding errors are reproducible.
template <class Traits, bool kIsOrdered>
CUTE_DEVICE void store_gradients(const BackwardParams& p, typename Traits::SharedStorage& shared) {
  wait_for_previous_kernel();
  const bool stores = !kIsOrdered || threadIdx.x % 32 == 0;
  SingleBuffer sums, gradients;
  Ring<2> slot;
  while (true) {
    slot.wait_full(shared.full_plan);
    const auto& plan = shared.plan[slot.index];
    if (plan.q_tiles < 0) return;
    BackwardMaps::acquire(entry_maps<Traits>(p), kQueryGradientsOfEntry, plan.batch, plan.query_map);
    const CUtensorMap* map = BackwardMaps::select_map(entry_maps<Traits>(p), p.query_gradient, kQueryGradientsOfEntry,
                                                      plan.batch, plan.query_map);
    for (int i = 0; i < p.heads_per_kv; ++i) {
      const int row = plan.batch * p.heads + plan.kv_head * p.heads_per_kv + i;
      const int slot_of_sums = row * p.queries + plan.q_token;
      QueryWalk walk(plan.hull_begin);
      [[maybe_unused]] std::int32_t* additions = nullptr;
      [[maybe_unused]] OrderedAddition addition{};
      [[maybe_unused]] std::int32_t count = -1;
      if constexpr (kIsOrdered) {
        additions = p.schedule.group_additions(row, plan.group);
        addition = plan_addition(p, plan, walk);
      }
      for (int tile = 0; tile < plan.q_tiles; ++tile) {
        [[maybe_unused]] std::int32_t* const tile_additions = additions + addition.q_tile;
        if (stores) {
          if constexpr (kIsOrdered) await_count(tile_additions, addition.before, count);
          sums.wait_full(shared.full_sums);
          add_sums<Traits>(p, shared, map, slot_of_sums, plan.is_additional, walk);
        }
        if constexpr (kIsOrdered) __syncwarp();
        sums.advance();
        walk.next(p.axis, plan.hull_begin, plan.hull_end);
        if constexpr (kIsOrdered) addition = plan_addition(p, plan, walk);
        if (stores) {
          tma_store_wait<0>();
          arrive(shared.empty_sums);
          if constexpr (kIsOrdered) {
            // Loads the count for the next query tile while TMA adds the current dQ tile.
            count = tile + 1 < plan.q_tiles ? load_count(additions + addition.q_tile) : -1;
            asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
            count_one(tile_additions);
          }
        }
      }
    }
    if (stores) {
      gradients.wait_full(shared.full_gradients);
      const CUtensorMap *keys = &p.additional_keys_gradient, *values = &p.additional_values_gradient;
      if (!plan.is_additional) {
        keys = BackwardMaps::select_map(entry_maps<Traits>(p), p.key_gradient, kKeyGradientsOfEntry, plan.batch,
                                        plan.kv_map);
        values = BackwardMaps::select_map(entry_maps<Traits>(p), p.value_gradient, kValueGradientsOfEntry, plan.batch,
                                          plan.kv_map);
        BackwardMaps::acquire(entry_maps<Traits>(p), kKeyGradientsOfEntry, plan.batch, plan.kv_map);
        BackwardMaps::acquire(entry_maps<Traits>(p), kValueGradientsOfEntry, plan.batch, plan.kv_map);
      }
      store_key_tile<Traits>(p, shared, plan, keys, values);
    }
    if constexpr (kIsOrdered) __syncwarp();
    gradients.advance();
    arrive(shared.empty_plan[slot.index]);
    slot.advance();
  }
}

}  // namespace natten_jax::sm90
