// The forward kernel's shared memory and the warps that move tiles: those that load, plan and store.
#pragma once

#include "cuda/common/arithmetic.cuh"
#include "cuda/common/column_mask.cuh"
#include "cuda/common/tile_walk.cuh"
#include "cuda/sm90/params.h"
#include "cuda/sm90/pipeline.cuh"
#include "cuda/sm90/tile_plan.cuh"

namespace natten_jax::sm90 {

// How a key/value tile is masked.
constexpr int kNoMask = 0;
constexpr int kWindowMask = 1;
constexpr int kColumnMask = 2;

// Named barriers; the first eight are CUTLASS's own.
constexpr int kProductOrder = 8;  // and the next one: whose turn it is to issue products
constexpr int kOutputReady = 10;  // both warpgroups have written their rows
constexpr int kMaskReady = 11;

template <class Element_, int kHeadDim_, int kColumns_, bool kPingPong_>
struct ForwardTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;  // at least head_dim and head_dim_v
  static constexpr int kColumns = kColumns_;  // keys of a tile
  static constexpr int kStages = 2;
  // Whether the warpgroups take turns in issuing products, or run unordered.
  static constexpr bool kPingPong = kPingPong_;
  // Where registers do not hold the query, shared memory does not hold a separate output tile either.
  static constexpr bool kQueryInRegisters = kHeadDim <= 128;

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
    alignas(1024) Element o[kQueryInRegisters ? cosize_v<LayoutQ> : kChunk];
    TilePlan plan[2];
    int4 tile[kStages];                   // of the tile in a key buffer: first key (x, y, z) and how it is masked
    uchar4 row_coordinates[kRows];        // of a row in the query tile: x, y, z
    uchar4 column_coordinates[kColumns];  // of a column in the key/value tile
    Origin origins[6];
    std::uint32_t mask_words[ColumnMask::capacity(kColumns)];
    alignas(8) std::uint64_t full_q, empty_q, empty_o, full_plan[2], empty_plan[2];
    std::uint64_t full_k[kStages], empty_k[kStages], full_v[kStages], empty_v[kStages];
  };
};

/// One warp: plans tiles ahead of the loads and the products.
template <class SharedStorage>
CUTE_DEVICE void plan_tiles(const ForwardParams& p, SharedStorage& shared) {
  int slot = 0, phase = 0;
  for (int round = 0;; ++round) {
    const int first = round * gridDim.x;
    const bool is_last = first >= p.tiles;
    // Every other round runs backwards, so that no CTA always gets the shorter tiles.
    const int tile = first + (round % 2 == 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    if (!is_last && tile >= p.tiles) continue;
    wait(shared.empty_plan[slot], phase ^ 1);
    if (is_last) {
      shared.plan[slot].kv_tiles = -1;
    } else if (!plan_tile(p, shared.origins, shared.row_coordinates, tile, shared.plan[slot])) {
      continue;
    }
    __syncwarp();
    arrive(shared.full_plan[slot]);  // every lane wrote a part
    if (is_last) return;
    advance<2>(slot, phase);
  }
}

/// One thread: loads the query and key tiles, or the value tiles, that the plans ask for. The two rings advance on
/// their own, because a key buffer falls free well before the value buffer of the same tile.
template <class Traits, bool kIsKey>
CUTE_DEVICE void load_tiles(const ForwardParams& p, typename Traits::SharedStorage& shared) {
  using Element = typename Traits::Element;
  constexpr int kRowBytes = kChunk * sizeof(Element);
  const int head_dim = kIsKey ? p.head_dim : p.head_dim_v;
  const int chunks = head_dim / kChunk;
  std::uint64_t* full = kIsKey ? shared.full_k : shared.full_v;
  std::uint64_t* empty = kIsKey ? shared.empty_k : shared.empty_v;
  Element* buffers = kIsKey ? shared.k : shared.v;
  int stage = 0, phase = 0, q_phase = 0, slot = 0, plan_phase = 0;
  const auto load = [&](const CUtensorMap* map, int rows, int column, int z, int y, int x, int batch, int mask) {
    wait(empty[stage], phase ^ 1);
    if constexpr (kIsKey) shared.tile[stage] = make_int4(x, y, z, mask);
    ClusterTransactionBarrier::arrive_and_expect_tx(&full[stage], chunks * rows * kRowBytes);
    load_tile(map, &full[stage], buffers + stage * Traits::kColumns * Traits::kHeadDim, chunks, Traits::kColumns,
              column, z, y, x, batch);
    advance<Traits::kStages>(stage, phase);
  };
  while (true) {
    wait(shared.full_plan[slot], plan_phase);
    const TilePlan& plan = shared.plan[slot];
    const int kv_tiles = plan.kv_tiles, batch = plan.batch;
    if (kv_tiles < 0) return;
    if constexpr (kIsKey) {
      wait(shared.empty_q, q_phase ^ 1);
      q_phase ^= 1;
      ClusterTransactionBarrier::arrive_and_expect_tx(&shared.full_q, chunks * p.q_tile_tokens * kRowBytes);
      load_tile<Element>(&p.query[plan.query_map], &shared.full_q, shared.q, chunks, kRows, plan.query_column,
                         plan.q_begin.z, plan.q_begin.y, plan.q_begin.x, batch);
    }
    const CUtensorMap* map = kIsKey ? &p.key[plan.kv_map] : &p.value[plan.kv_map];
    const CUtensorMap* additional_map = kIsKey ? &p.additional_keys : &p.additional_values;
    const int column = kIsKey ? plan.key_column : plan.value_column, additional_column = plan.kv_head * head_dim;
    const int4 hull_begin = plan.hull_begin, hull_end = plan.hull_end;
    const int4 inner_begin = plan.inner_begin, inner_end = plan.inner_end;
    arrive(shared.empty_plan[slot]);
    advance<2>(slot, plan_phase);
    const bool is_whole = p.kv_tile_tokens == Traits::kColumns;
    KvWalk walk(hull_begin);
    for (int i = 0; i < kv_tiles; ++i) {
      const bool is_masked = kIsKey && !(is_whole && walk.is_inside(p.axis, inner_begin, inner_end));
      load(map, p.kv_tile_tokens, column, walk.z, walk.y, walk.x, batch, is_masked ? kWindowMask : kNoMask);
      walk.next(p.axis, hull_begin, hull_end);
    }
    for (int first = 0; first < p.additional_kv; first += Traits::kColumns) {
      const bool is_masked = p.additional_kv - first < Traits::kColumns;
      load(additional_map, Traits::kColumns, additional_column, first, 0, 0, batch, is_masked ? kColumnMask : kNoMask);
    }
  }
}

/// One warp: stores the output tiles; what lies outside the layout is clipped.
template <class Traits>
CUTE_DEVICE void store_tiles(const ForwardParams& p, typename Traits::SharedStorage& shared) {
  auto* tile = Traits::kQueryInRegisters ? shared.o : shared.q;
  int slot = 0, plan_phase = 0;
  while (true) {
    wait(shared.full_plan[slot], plan_phase);
    const TilePlan& plan = shared.plan[slot];
    if (plan.kv_tiles < 0) return;
    cutlass::arch::NamedBarrier::sync(kConsumers + 32, named_barrier(kOutputReady));
    if (threadIdx.x % 32 == 0) {
      for (int chunk = 0; chunk < p.head_dim_v / kChunk; ++chunk) {
        SM90_TMA_STORE_5D::copy(&p.out[plan.query_map], tile + chunk * kRows * kChunk,
                                plan.output_column + chunk * kChunk, plan.q_begin.z, plan.q_begin.y, plan.q_begin.x,
                                plan.batch);
      }
      tma_store_arrive();
      tma_store_wait<0>();
      arrive(Traits::kQueryInRegisters ? shared.empty_o : shared.empty_q);
    }
    __syncwarp();
    arrive(shared.empty_plan[slot]);  // every lane read it
    advance<2>(slot, plan_phase);
  }
}

}  // namespace natten_jax::sm90
