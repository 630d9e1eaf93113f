// The forward kernel's shared memory and the warps that move tiles: those that load, plan and store.
#pragma once

#include "cuda/common/arithmetic.cuh"
#include "cuda/common/column_mask.cuh"
#include "cuda/common/tile_walk.cuh"
#include "cuda/sm90/params.h"
#include "cuda/sm90/pipeline.cuh"
#include "cuda/sm90/tile_plan.cuh"

namespace natten_jax::sm90 {

// How a key/value tile is masked for a warpgroup, two bits each.
constexpr int kNoMask = 0;
constexpr int kWindowMask = 1;
constexpr int kEndMask = 2;  // additional tokens: columns past the last one
constexpr int kHidden = 3;   // none of its rows sees any of the tile
constexpr int kMaskBits = 2;
constexpr int kEachWarpgroup = 0b010101;  // times a mask: the same for all

// Named barriers; the first eight are CUTLASS's own.
constexpr int kProductOrder = 8;                               // one per warpgroup: it may issue its products
constexpr int kOutputReady = kProductOrder + kMostWarpgroups;  // the warpgroups have written their rows
constexpr int kMaskReady = kOutputReady + 1;

template <class Element_, int kHeadDim_, int kColumns_, int kWarpgroups_, bool kPingPong_>
struct ForwardTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;  // at least head_dim and head_dim_v
  static constexpr int kColumns = kColumns_;  // keys of a tile
  static constexpr int kStages = 2;
  static constexpr int kWarpgroups = kWarpgroups_;  // that compute
  static constexpr int kRows = 64 * kWarpgroups;    // queries of a tile
  static constexpr int kConsumers = 128 * kWarpgroups, kThreads = 128 + kConsumers;
  // What the 65536 registers of a multiprocessor give each thread.
  static constexpr int kConsumerRegisters = kWarpgroups == 2 ? 232 : 160;
  static constexpr int kServiceRegisters = kWarpgroups == 2 ? 40 : 32;
  // Whether the warpgroups issue their products one after the other, or unordered.
  static constexpr bool kPingPong = kPingPong_;
  // Three warpgroups lack the registers, wide heads the shared memory for an output tile of its own, too.
  static constexpr bool kQueryInRegisters = kHeadDim <= 128 && kWarpgroups == 2;
  static constexpr bool kSeparateOutput = kHeadDim <= 128;

  using LayoutQ = decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<Element>{}, Shape<Int<kRows>, Int<kHeadDim>>{}));
  using LayoutK = decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<Element>{},
                                         Shape<Int<kColumns>, Int<kHeadDim>, Int<kStages>>{}));
  // A value tile is loaded as [token][head_dim]; the second product reads it with head_dim as its row.
  using LayoutVt = decltype(tile_to_shape(GMMA::Layout_MN_SW128_Atom<Element>{},
                                          Shape<Int<kHeadDim>, Int<kColumns>, Int<kStages>>{}, Step<_2, _1, _3>{}));

  static constexpr auto query_key_product() {
    using Tile = Shape<_64, Int<kColumns>, Int<kHeadDim>>;
    constexpr auto kMajor = GMMA::Major::K;
    if constexpr (kQueryInRegisters) {
      return make_tiled_mma(GMMA::rs_op_selector<Element, Element, float, Tile, kMajor, kMajor>());
    } else {
      return make_tiled_mma(GMMA::ss_op_selector<Element, Element, float, Tile, kMajor, kMajor>());
    }
  }
  static constexpr auto weight_value_product() {
    using Tile = Shape<_64, Int<kHeadDim>, Int<kColumns>>;
    return make_tiled_mma(GMMA::rs_op_selector<Element, Element, float, Tile, GMMA::Major::K, GMMA::Major::MN>());
  }

  struct SharedStorage {
    alignas(1024) Element q[cosize_v<LayoutQ>];
    alignas(1024) Element k[cosize_v<LayoutK>];
    alignas(1024) Element v[cosize_v<LayoutVt>];
    alignas(1024) Element o[kSeparateOutput ? cosize_v<LayoutQ> : kChunk];
    TilePlan plan[2];
    int4 tile[kStages];  // of the tile in a key buffer: first key (x, y, z) and how it is masked
    std::uint32_t mask_words[KeyColumnMask::capacity(kColumns)];
    alignas(8) std::uint64_t first_key_loaded, full_q, empty_q, empty_o, full_plan[2], full_windows[2], empty_plan[2];
    std::uint64_t full_k[kStages], empty_k[kStages], full_v[kStages], empty_v[kStages];
  };
};

/// The tile that a CTA takes in a round, or one past the last.
CUTE_DEVICE int take_tile(const ForwardParams& p, int round) {
  const int first = round * static_cast<int>(gridDim.x);
  if (p.next_tile == nullptr) {
    // Every other round runs backwards, so that no CTA always gets the shorter tiles.
    return first + static_cast<int>(round % 2 == 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
  }
  if (round == 0) return blockIdx.x;
  int taken = 0;
  if (threadIdx.x % 32 == 0) taken = atomicAdd(p.next_tile, 1);
  return gridDim.x + __shfl_sync(0xffffffffu, taken, 0);
}

/// One warp: plans tiles ahead of the loads and the products.
template <class SharedStorage>
CUTE_DEVICE void plan_tiles(const ForwardParams& p, SharedStorage& shared) {
  int slot = 0, phase = 0;
  // A lane splits the origins of the dimension that it plans.
  const int d = planned_dimension();
  const Origin query_origin = Origin::load(p.origins, d, p.axis[d].dilation);
  const Origin kv_origin = Origin::load(p.origins, 3 + d, p.axis[d].dilation);
  for (int round = 0;; ++round) {
    const int tile = take_tile(p, round);
    // A fixed order's last round may lack this tile only; taken tiles count up.
    const bool is_last = p.next_tile == nullptr ? round * static_cast<int>(gridDim.x) >= p.tiles : tile >= p.tiles;
    if (!is_last && tile >= p.tiles) continue;
    wait(shared.empty_plan[slot], phase ^ 1);
    TilePlan& plan = shared.plan[slot];
    if (is_last) {
      plan.kv_tiles = -1;
      arrive(shared.full_plan[slot]);
      return;
    }
    int batch, head;
    const AxisPlan own = plan_axis(p, query_origin, kv_origin, tile, batch, head);
    if (__any_sync(0xffffffffu, own.q_begin >= own.queries)) continue;  // past its dilation group's end
    plan_tile(p, own, batch, head, plan);
    arrive(shared.full_plan[slot]);  // every lane wrote a part
    plan_windows(p, own, plan);
    arrive(shared.full_windows[slot]);
    advance<2>(slot, phase);
  }
}

CUTE_DEVICE int4 as_int4(const int (&v)[4]) {
  return *reinterpret_cast<const int4*>(v);
}

CUTE_DEVICE bool is_empty(int4 begin, int4 end) {
  return end.x <= begin.x || end.y <= begin.y || end.z <= begin.z;
}

/// How a tile is masked for each warpgroup; an incomplete one (`is_whole` false) always is. At least one tile of a
/// query tile is not hidden.
template <int kWarpgroups>
CUTE_DEVICE int window_masks(const ForwardParams& p, const TilePlan& plan, const KvWalk& walk, bool is_whole) {
  int masks = 0;
#pragma unroll 1
  for (int warpgroup = 0; warpgroup < kWarpgroups; ++warpgroup) {
    int mask = kWindowMask;
    const int4 seen_begin = as_int4(plan.seen_begin[warpgroup]), seen_end = as_int4(plan.seen_end[warpgroup]);
    if (walk.is_outside(p.axis, seen_begin, seen_end) && !is_empty(seen_begin, seen_end)) {
      mask = kHidden;
    } else if (is_whole &&
               walk.is_inside(p.axis, as_int4(plan.inner_begin[warpgroup]), as_int4(plan.inner_end[warpgroup]))) {
      mask = kNoMask;
    }
    masks |= mask << kMaskBits * warpgroup;
  }
  return masks;
}

/// How many tiles of the line along the last dimension, from one on that no warpgroup masks, are unmasked like it.
template <int kWarpgroups>
CUTE_DEVICE int unmasked_tiles(const ForwardParams& p, const TilePlan& plan, const KvWalk& walk) {
  int end = plan.inner_end[0][2];
  CUTE_UNROLL
  for (int warpgroup = 1; warpgroup < kWarpgroups; ++warpgroup) end = min(end, plan.inner_end[warpgroup][2]);
  return p.axis[2].by_kv_tile.divide(end - walk.z);
}

/// One thread: loads the query and key tiles, or the value tiles, that the plans ask for. The two rings advance on
/// their own, because a key buffer falls free well before the value buffer of the same tile.
template <class Traits, bool kIsKey>
CUTE_DEVICE void load_tiles(const ForwardParams& p, typename Traits::SharedStorage& shared) {
  using Element = typename Traits::Element;
  constexpr int kRowBytes = kChunk * sizeof(Element);
  const int chunks = ((kIsKey ? p.head_dim : p.head_dim_v) + kChunk - 1) / kChunk;
  std::uint64_t* full = kIsKey ? shared.full_k : shared.full_v;
  std::uint64_t* empty = kIsKey ? shared.empty_k : shared.empty_v;
  Element* buffers = kIsKey ? shared.k : shared.v;
  int stage = 0, phase = 0, q_phase = 0, slot = 0, plan_phase = 0;
  bool is_first = true;
  const auto load = [&](const CUtensorMap* map, int rows, int start, int z, int y, int x, int mask) {
    wait(empty[stage], phase ^ 1);
    if (!kIsKey && is_first) wait(shared.first_key_loaded, 0);
    if constexpr (kIsKey) shared.tile[stage] = make_int4(x, y, z, mask);
    ClusterTransactionBarrier::arrive_and_expect_tx(&full[stage], chunks * rows * kRowBytes);
    load_tile(map, &full[stage], buffers + stage * Traits::kColumns * Traits::kHeadDim, chunks, Traits::kColumns, 0,
              start, z, y, x);
    if (kIsKey && is_first) {
      // All that the first product needs is on its way alone.
      wait(full[stage], phase);
      arrive(shared.first_key_loaded);
    }
    is_first = false;
    advance<Traits::kStages>(stage, phase);
  };
  while (true) {
    wait(shared.full_plan[slot], plan_phase);
    const TilePlan& plan = shared.plan[slot];
    const int kv_tiles = plan.kv_tiles;
    if (kv_tiles < 0) return;
    if constexpr (kIsKey) {
      wait(shared.empty_q, q_phase ^ 1);
      q_phase ^= 1;
      ClusterTransactionBarrier::arrive_and_expect_tx(&shared.full_q, chunks * p.q_tile_tokens * kRowBytes);
      load_tile<Element>(&p.query[plan.query_map], &shared.full_q, shared.q, chunks, Traits::kRows, 0, plan.query_slot,
                         plan.q_begin[2], plan.q_begin[1], plan.q_begin[0]);
    }
    const CUtensorMap* map = kIsKey ? &p.key[plan.kv_map] : &p.value[plan.kv_map];
    const CUtensorMap* additional_map = kIsKey ? &p.additional_keys : &p.additional_values;
    const int kv_slot = plan.kv_slot, additional_slot = plan.additional_slot;
    const int4 hull_begin = as_int4(plan.hull_begin), hull_end = as_int4(plan.hull_end);
    const bool is_whole = p.kv_tile_tokens == Traits::kColumns;
    KvWalk walk(hull_begin);
    int unmasked = 0;
    for (int i = 0; i < kv_tiles; ++i) {
      int masks = 0;
      if (kIsKey && unmasked == 0) {
        masks = window_masks<Traits::kWarpgroups>(p, plan, walk, is_whole);
        if (masks == 0) unmasked = unmasked_tiles<Traits::kWarpgroups>(p, plan, walk);
      }
      if (unmasked > 0) --unmasked;
      load(map, p.kv_tile_tokens, kv_slot, walk.z, walk.y, walk.x, masks);
      walk.next(p.axis, hull_begin, hull_end);
    }
    for (int first = 0; first < p.additional_kv; first += Traits::kColumns) {
      const int mask = p.additional_kv - first < Traits::kColumns ? kEndMask : kNoMask;
      load(additional_map, Traits::kColumns, additional_slot, first, 0, 0, mask * kEachWarpgroup);
    }
    arrive(shared.empty_plan[slot]);
    advance<2>(slot, plan_phase);
  }
}

/// One warp: stores the output tiles; what lies outside the layout is clipped.
template <class Traits>
CUTE_DEVICE void store_tiles(const ForwardParams& p, typename Traits::SharedStorage& shared) {
  auto* tile = Traits::kSeparateOutput ? shared.o : shared.q;
  int slot = 0, plan_phase = 0;
  while (true) {
    wait(shared.full_plan[slot], plan_phase);
    const TilePlan& plan = shared.plan[slot];
    if (plan.kv_tiles < 0) return;
    cutlass::arch::NamedBarrier::sync(Traits::kConsumers + 32, named_barrier(kOutputReady));
    if (threadIdx.x % 32 == 0) {
      for (int chunk = 0; chunk < (p.head_dim_v + kChunk - 1) / kChunk; ++chunk) {
        SM90_TMA_STORE_5D::copy(&p.out[plan.query_map], tile + chunk * Traits::kRows * kChunk, chunk * kChunk,
                                plan.query_slot, plan.q_begin[2], plan.q_begin[1], plan.q_begin[0]);
      }
      tma_store_arrive();
      tma_store_wait<0>();
      arrive(Traits::kSeparateOutput ? shared.empty_o : shared.empty_q);
    }
    __syncwarp();
    arrive(shared.empty_plan[slot]);  // every lane read it
    advance<2>(slot, plan_phase);
  }
}

}  // namespace natten_jax::sm90
