// Work of the producer warps of the forward kernel, which plan, load and store tiles.
#pragma once

#include "cuda/common/tile_walk.cuh"
#include "cuda/sm90/forward_key_bias.cuh"
#include "cuda/sm90/forward_mask.cuh"
#include "cuda/sm90/seams.cuh"
#include "cuda/tma/entry_maps.cuh"

namespace natten_jax::sm90 {

using ForwardMaps = MapsOfEntries<kForwardArrays, kGroupClasses>;

/// First query of a query tile, if the launch continues earlier ones: its index in the dilation group, along the
/// dimension that the lane plans.
CUTE_DEVICE int begin_of_continued(const ForwardParams& p, const TilePosition& position, Origin query_origin,
                                   Origin kv_origin) {
  const int d = planned_dimension();
  const DeviceAxis& axis = p.axis[d];
  const int index = d == 0 ? position.index[0] : d == 1 ? position.index[1] : position.index[2];
  // `first` is `first_query` divided by the dilation, rounded down. In some dilation groups, the first query at or
  // after `first_query` has index `first + 1`. The tiles of these groups begin one query early.
  const int first = axis.dilations(min(max(p.first_query[d], 0), axis.query_local_extent));
  const int distance = kv_origin.index - (query_origin.index + first);
  return first + QueryTileSchedule::nearest_first(axis, index, distance) * axis.q_tile;
}

/// Plans all query tiles of the CTA, before other warps load and compute them. Runs in one warp.
template <class Traits>
CUTE_DEVICE void plan_tiles(const ForwardParams& p, typename Traits::SharedStorage& shared) {
  Ring<Traits::kPlans> slot;
  // Each lane loads the origins of the queries and of the keys in the dimension that it plans.
  const int d = planned_dimension();
  const std::int32_t* const origins = Traits::kIsPlain ? nullptr : p.origins;
  const Origin query_origin = Origin::load(origins, d, p.axis[d].dilation);
  const Origin kv_origin = Origin::load(origins, 3 + d, p.axis[d].dilation);
  int batch = -1;
  EntryLayout layout;  // layout of batch entry `batch`
  for (int round = 0;; ++round) {
    slot.wait_empty(shared.empty_plan);
    // Take a tile only after a plan slot is free, so that the next tile goes to the CTA that is done first.
    const int tile = p.supply.take(round);
    TilePlan& plan = shared.plan[slot.index];
    if (tile >= p.supply.tiles) {
      plan.kv_tiles = -1;
      arrive(shared.full_plan[slot.index]);
      return;
    }
    const TilePosition position = p.schedule.locate(p.axis, tile);
    EntryAxis entry(p.axis[d], query_origin, kv_origin);
    if (!Traits::kIsPlain && p.layouts != nullptr) {
      if (position.batch != batch) layout = EntryLayout(p.layouts, batch = position.batch);
      entry = EntryAxis(p.axis[d], layout, d);
    }
    QueryAxisPlan own = plan_axis(p.axis, position, entry);
    if (continues<Traits>(p)) own.q_begin = begin_of_continued(p, position, query_origin, kv_origin);
    // Skip tiles that lie past the end of their dilation group.
    if (__any_sync(0xffffffffu, own.q_begin >= own.query.local_length)) continue;
    plan_tile<Traits::kIsPlain>(p, entry, own, position, plan);
    arrive(shared.full_plan[slot.index]);  // every lane arrives, because every lane wrote a part of the plan
    plan_windows<Traits::kIsPlain>(p, own, plan);
    arrive(shared.full_windows[slot.index]);
    slot.advance();
  }
}

CUTE_DEVICE int4 as_int4(const int (&v)[4]) {
  return *reinterpret_cast<const int4*>(v);
}

CUTE_DEVICE bool is_empty(int4 begin, int4 end) {
  return end.x <= begin.x || end.y <= begin.y || end.z <= begin.z;
}

/// Mask modes of the key/value tile at `walk`, for all warpgroups. `is_whole` is true if a tile has a key for every
/// column of the logits. If it is false, no tile gets mode kNoMask. Every warpgroup has at least one key/value tile
/// with another mode than kHidden, even if the warpgroup attends to no keys.
template <int kWarpgroups>
CUTE_DEVICE int window_masks(const ForwardParams& p, const TilePlan& plan, const KvWalk& walk, bool is_whole) {
  int masks = 0;
#pragma unroll 1
  for (int warpgroup = 0; warpgroup < kWarpgroups; ++warpgroup) {
    int mask = kWindowMask;
    const int4 visible_begin = as_int4(plan.visible_begin[warpgroup]),
               visible_end = as_int4(plan.visible_end[warpgroup]);
    if (walk.is_outside(p.axis, visible_begin, visible_end) && !is_empty(visible_begin, visible_end)) {
      mask = kHidden;
    } else if (is_whole &&
               walk.is_inside(p.axis, as_int4(plan.inner_begin[warpgroup]), as_int4(plan.inner_end[warpgroup]))) {
      mask = kNoMask;
    }
    masks |= mask << kMaskBits * warpgroup;
  }
  return masks;
}

/// Number of consecutive tiles along the last dimension that need no mask. The first of them is the tile at `walk`.
template <int kWarpgroups>
CUTE_DEVICE int unmasked_tiles(const ForwardParams& p, const TilePlan& plan, const KvWalk& walk) {
  int end = plan.inner_end[0][2];
  CUTE_UNROLL
  for (int warpgroup = 1; warpgroup < kWarpgroups; ++warpgroup) end = min(end, plan.inner_end[warpgroup][2]);
  return p.axis[2].by_kv_tile.divide(end - walk.z);
}

/// Loads key tiles (`kIsKey`) or value tiles into a ring of buffers. Runs in one thread. If keys have biases, the
/// loader of value tiles runs in a warp instead. Keys and values have separate rings, because the keys of a tile are
/// released well before its values.
template <class Traits, bool kIsKey>
struct TileLoader {
  using Element = typename Traits::Element;
  using SharedStorage = typename Traits::SharedStorage;
  static constexpr int kElements = kChunkOf<Element>;
  static constexpr bool kLoadsBiases = !kIsKey && Traits::kHasKeyBias;

  SharedStorage& shared;
  int chunks;       // Number of chunks of a head (rows_of_head).
  int tile_tokens;  // Number of tokens of a key/value tile.
  Ring<Traits::kStages> stage;
  bool is_first = true;
  std::conditional_t<kLoadsBiases, TileBiases<Traits>, NoBiases> biases;

  CUTE_DEVICE TileLoader(const ForwardParams& p, SharedStorage& shared)
      : shared(shared),
        chunks(rows_of_head<kElements>(kIsKey ? p.head_dim : p.head_dim_v)),
        tile_tokens(p.kv_tile_tokens) {}

  /// True in the thread that issues the TMA loads.
  CUTE_DEVICE static bool leads() { return !kLoadsBiases || threadIdx.x % kWarp == 0; }

  /// Loads a tile.
  ///
  /// Args:
  ///   tile: the tile's element of SharedStorage::tile, which the consumer warpgroups read.
  ///   start: callable that issues the load. Its arguments are an mbarrier and the destination.
  template <class Start>
  CUTE_DEVICE void load(int4 tile, const Start& start) {
    auto& full = kIsKey ? shared.full_k : shared.full_v;
    stage.wait_empty(kIsKey ? shared.empty_k : shared.empty_v);
    if (!kIsKey && is_first) wait(shared.first_key_loaded, 0);
    if (leads()) {
      if constexpr (kIsKey) shared.tile[stage.index] = tile;
      ClusterTransactionBarrier::arrive_and_expect_tx(&full[stage.index], chunks * tile_tokens * kSwizzledRow);
      start(&full[stage.index],
            (kIsKey ? shared.k : shared.v) + stage.index * Traits::kColumns * Traits::kLoadedHeadDim);
    }
    if (kIsKey && is_first) {
      // The first key tile is loaded before any value tile, so that the first product starts as early as possible.
      stage.wait_full(full);
      if (leads()) arrive(shared.first_key_loaded);
    }
    is_first = false;
    stage.advance();
  }
};

/// Loads the tiles of all plans: query and key tiles if `kIsKey`, otherwise value tiles. Runs in one thread. If keys
/// have biases, the function runs in a warp to load value tiles.
template <class Traits, bool kIsKey>
CUTE_DEVICE void load_tiles(const ForwardParams& p, typename Traits::SharedStorage& shared) {
  TileLoader<Traits, kIsKey> loader(p, shared);
  const CUtensorMap* const entry_maps = Traits::kIsPlain ? nullptr : p.entry_maps;
  int acquired = -1, acquired_query = -1;
  SingleBuffer query;
  Ring<Traits::kPlans> slot;
  while (true) {
    slot.wait_full(shared.full_plan);
    const TilePlan& plan = shared.plan[slot.index];
    const int kv_tiles = plan.kv_tiles;
    if (kv_tiles < 0) return;
    if constexpr (kIsKey) {
      query.wait_empty(shared.empty_q);
      query.advance();
      if (loader.leads()) {
        ClusterTransactionBarrier::arrive_and_expect_tx(&shared.full_q, loader.chunks * p.q_tile_tokens * kSwizzledRow);
        ForwardMaps::acquire(entry_maps, kQueryOfEntry, plan.batch, plan.query_map, acquired_query);
        load_tile(ForwardMaps::select_map(entry_maps, p.query, kQueryOfEntry, plan.batch, plan.query_map),
                  &shared.full_q, shared.q, loader.chunks, Traits::kRows, plan.q_begin[2], plan.q_begin[1],
                  plan.q_begin[0], plan.query_slot);
      }
    }
    constexpr int kArray = kIsKey ? kKeyOfEntry : kValueOfEntry;
    ForwardMaps::acquire(entry_maps, kArray, plan.batch, plan.kv_map, acquired);
    const CUtensorMap* map =
        ForwardMaps::select_map(entry_maps, kIsKey ? p.key : p.value, kArray, plan.batch, plan.kv_map);
    const CUtensorMap* additional_map = kIsKey ? &p.additional_keys : &p.additional_values;
    const int kv_slot = plan.kv_slot, additional_slot = plan.additional_slot;
    const int4 hull_begin = as_int4(plan.hull_begin), hull_end = as_int4(plan.hull_end);
    const bool is_whole = p.kv_tile_tokens == Traits::kColumns;
    KvWalk walk(hull_begin);
    if constexpr (loader.kLoadsBiases) {
      loader.biases.start(p, plan);
      if (kv_tiles > 0) loader.biases.fetch(p, shared, walk, 0);
    }
    int unmasked = 0;
    for (int i = 0; i < kv_tiles; ++i) {
      int masks = 0;
      if (kIsKey && unmasked == 0) {
        masks = window_masks<Traits::kWarpgroups>(p, plan, walk, is_whole);
        if (masks == 0) unmasked = unmasked_tiles<Traits::kWarpgroups>(p, plan, walk);
      }
      if (unmasked > 0) --unmasked;
      if constexpr (loader.kLoadsBiases) {
        // Starts to copy the next tile's biases before waiting for a value buffer for this tile.
        const bool is_last = i + 1 == kv_tiles;
        if (!is_last) {
          KvWalk next = walk;
          next.next(p.axis, hull_begin, hull_end);
          loader.biases.fetch(p, shared, next, 1);
        }
        loader.biases.finish(shared, is_last);
      }
      loader.load(make_int4(walk.x, walk.y, walk.z, masks), [&](std::uint64_t* full, auto* to) {
        if (Traits::kIsPlain || !p.kv_boxes.has_seams) {
          load_tile(map, full, to, loader.chunks, Traits::kColumns, walk.z, walk.y, walk.x, kv_slot);
          return;
        }
        for_boxes(p.kv_boxes, p.axis, walk.x, walk.y, walk.z, true, [&](int row, int x, int y, int z) {
          load_tile<1>(map, full, to + row * loader.kElements, loader.chunks, Traits::kColumns, z, y, x, kv_slot);
        });
      });
      walk.next(p.axis, hull_begin, hull_end);
    }
    // Tiles of additional tokens have the size of other tiles, even if more tokens fit into shared memory. So no load
    // ever writes the rows of a buffer past the size of a tile, and the values in these rows stay finite. The loop
    // counts tiles instead of tokens, because counting tokens changes how ptxas schedules the softmax of the consumer
    // warpgroups.
    for (int i = 0; i < p.additional_tiles; ++i) {
      const int first = i * p.kv_tile_tokens;
      const int columns = min(p.additional_kv - first, p.kv_tile_tokens);
      const int mask = columns < Traits::kColumns ? kEndMask : kNoMask;
      if constexpr (loader.kLoadsBiases) {
        loader.biases.clear(shared);
        loader.biases.finish(shared, true);
      }
      loader.load(make_int4(0, 0, p.additional_kv - columns, mask * kEachWarpgroup),
                  [&](std::uint64_t* full, auto* to) {
                    load_tile(additional_map, full, to, loader.chunks, Traits::kColumns, first, 0, 0, additional_slot);
                  });
    }
    arrive(shared.empty_plan[slot.index]);
    slot.advance();
  }
}

/// Copies a query tile's logsumexps and remainders of earlier launches to shared memory, and starts to load the output
/// of these launches. Warp-collective.
template <class Traits>
CUTE_DEVICE void fetch_earlier(const ForwardParams& p, const TilePlan& plan, typename Traits::SharedStorage& shared) {
  const int lane = threadIdx.x % 32;
  for (int row = lane; row < p.q_tile_tokens; row += 32) {
    const int token = RowPosition(p, row).token(p, plan);
    const std::int64_t at = statistic_of(p, plan, max(token, 0));
    shared.earlier[row] = token < 0 ? make_float2(-INFINITY, 0.f) : make_float2(p.logsumexp[at], p.remainder[at]);
  }
  if (lane == 0) {
    const int chunks = rows_of_head<kChunk>(p.head_dim_v);
    ClusterTransactionBarrier::arrive_and_expect_tx(&shared.empty_o, chunks * p.q_tile_tokens * kSwizzledRow);
    load_tile(&p.out[plan.query_map], &shared.empty_o, shared.o, chunks, Traits::kRows, plan.q_begin[2],
              plan.q_begin[1], plan.q_begin[0], plan.query_slot);
  } else {
    arrive(shared.empty_o);
  }
}

/// Stores the output tiles to global memory. TMA does not write elements outside of the layout. Runs in one warp.
template <class Traits>
CUTE_DEVICE void store_tiles(const ForwardParams& p, typename Traits::SharedStorage& shared) {
  auto* tile = Traits::output_tile(shared);
  const CUtensorMap* const entry_maps = Traits::kIsPlain ? nullptr : p.entry_maps;
  int acquired = -1;
  Ring<Traits::kPlans> slot;
  while (true) {
    slot.wait_full(shared.full_plan);
    const TilePlan& plan = shared.plan[slot.index];
    if (plan.kv_tiles < 0) return;
    if constexpr (Traits::kSeparateOutput) {
      if (continues<Traits>(p)) fetch_earlier<Traits>(p, plan, shared);
    }
    cutlass::arch::NamedBarrier::sync(Traits::kConsumers + kWarp, named_barrier(kOutputReady));
    if (threadIdx.x % 32 == 0) {
      ForwardMaps::acquire(entry_maps, kOutOfEntry, plan.batch, plan.query_map, acquired);
      const CUtensorMap* map = ForwardMaps::select_map(entry_maps, p.out, kOutOfEntry, plan.batch, plan.query_map);
      for (int chunk = 0; chunk < rows_of_head<kChunk>(p.head_dim_v); ++chunk) {
        SM90_TMA_STORE_5D::copy(map, tile + chunk * Traits::kRows * kChunk, chunk * kChunk, plan.q_begin[2],
                                plan.q_begin[1], plan.q_begin[0], plan.query_slot);
      }
      tma_store_arrive();
      tma_store_wait<0>();
      if (!continues<Traits>(p)) arrive(Traits::kSeparateOutput ? shared.empty_o : shared.empty_q);
    }
    __syncwarp();
    arrive(shared.empty_plan[slot.index]);  // every lane arrives, because every lane has read the plan
    slot.advance();
  }
}

}  // namespace natten_jax::sm90
