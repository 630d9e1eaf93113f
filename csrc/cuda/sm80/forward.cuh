// Forward neighborhood attention for any GPU since Ampere: cp.async gathers of multi-dimensional tiles from the natural
// layout, mma.sync.
//
// A CTA owns a query tile, and a warp 16 or 32 of its rows: logits, online softmax in base 2, output. Key/value tiles
// start at the first key in the query tile's windows and are read in steps of a few columns. A tile that a warp's rows
// see completely is not masked, an invisible tile is skipped, and other tiles use a mask bit per element.
//
// The next step is loaded during a step if shared memory suffices; the SM's second CTA hides the remaining latency. On
// GPUs with a large shared memory, all of which one CTA may use, a single CTA per SM loads steps into a ring of
// buffers, and its warps, which need not be synchronised, hide each other's latency. Coordinates and flags of steps are
// computed ahead, many steps at a time, because in the loop this would compete with the products for registers and
// issue slots.
#pragma once

#include "cuda/sm80/forward_load.cuh"
#include "cuda/sm80/forward_rows.cuh"
#include "cuda/sm80/forward_traits.cuh"

namespace natten_jax::sm80 {

/// Computes the CTA's query tile, rows and columns. Returns false if the tile has no queries.
template <class Traits, bool kIsPlain>
CUTE_DEVICE bool plan_tile(const ForwardParams& p, typename Traits::SharedStorage& shared, int& batch, int& head) {
  const QueryAxisPlan own = plan_axis<kIsPlain>(p, blockIdx.x, batch, head);
  if (__any_sync(0xffffffffu, own.q_begin >= own.query.local_length)) return false;
  if (threadIdx.x >= Traits::kThreads - 32) {
    share_plan<typename Traits::Element, Traits::kColumns, kIsPlain>(p, own, batch, head, shared.plan);
  }
  const int warp = threadIdx.x / 32, row = 16 * Traits::kRowBlocks * warp + threadIdx.x % (16 * Traits::kRowBlocks);
  plan_row<kIsPlain>(p, own, row, shared.row_windows[row][0], shared.row_windows[row][1], shared.warp_boxes[warp]);
  for (int column = threadIdx.x; column < kMostColumns; column += Traits::kThreads) {
    shared.columns.template fill<&DeviceAxis::by_kv_tile>(p.axis, column, p.kv_tile_tokens, key_pitch(p));
  }
  return true;
}

/// Starts to copy the query tile.
template <class Traits>
CUTE_DEVICE void load_query(const ForwardParams& p, typename Traits::SharedStorage& shared, std::int64_t first_row) {
  const int query_bytes = p.head_dim * static_cast<int>(sizeof(typename Traits::Element));
  Gather<typename Traits::Tile, Traits::kRows, Traits::kThreads>().copy_tokens(
      shared_address(shared.q), static_cast<const char*>(p.query) + first_row * query_bytes, p.heads * query_bytes,
      query_bytes, [&](int row) { return shared.row_windows[row][0][3]; });
  commit_copies();
}

/// `kIsPlain`: true only for launches that are plain (is_plain); false supports all calls. A common scale of all heads
/// is a parameter, which needs no register, and register allocation in the step loop depends on the planning code
/// before it. With one kernel for all calls, forward passes took 1 to 5% longer for the scales, and 1 to 3% for the
/// layouts (H100).
template <class Traits, bool kIsPlain>
__global__ void __launch_bounds__(Traits::kThreads, 8 / Traits::kWarps)
    natten_jax_sm80_fna_forward(const __grid_constant__ ForwardParams p) {
  extern __shared__ __align__(128) char raw[];
  auto& shared = shared_storage<typename Traits::SharedStorage, Traits::kFewRegisters>(raw);

  if constexpr (Traits::kIsRing) shared.ring.initialise();
  int batch, head;
  if (!plan_tile<Traits, kIsPlain>(p, shared, batch, head)) return;
  __syncthreads();
  const std::int64_t first_row = batch * p.queries * p.heads + head;
  load_query<Traits>(p, shared, first_row);
  if constexpr (Traits::kHasKeyBias) find_biases<Traits>(p, shared, batch, head);
  StepCopies<Traits> copies(p, shared);
  shared.steps.fill(p, shared.plan, Traits::kColumns, 0);
  WarpRows<Traits> rows(p, shared, copies.k, copies.v);
  if (shared.plan.needs_mask) {
    KeyColumnMask(shared.mask_words, p.axis).template build<kMostColumns>(p.axis, threadIdx.x / 32, Traits::kWarps);
  }
  __syncthreads();
  copies.start();
  typename WarpRows<Traits>::Query query;
  if constexpr (Traits::kQueryInRegisters) {
    if (copies.steps > 0) {
      wait_copies<1>();
    } else {
      wait_copies<0>();
    }
    __syncthreads();
    rows.load_query(query);
  }

  typename WarpRows<Traits>::Output o = {};
  const float scale = kIsPlain ? p.scale.of_all : p.scale.of(batch * p.heads + head).logits;
  typename WarpRows<Traits>::Softmax softmax(scale * kLog2E);
  for (int step = 0; step < copies.steps; ++step) {
    const std::uint32_t stage_bytes = copies.begin(step);
    const auto sight = rows.sight(step);
    typename WarpRows<Traits>::Logits s = {};
    if (sight.any) {
      if constexpr (Traits::kHasKeyBias) start_at_biases<Traits>(s, shared, step);
      rows.multiply_by_keys(s, query, stage_bytes);
    }
    copies.between(step);
    if (sight.any) {
      if (!sight.whole) rows.mask(s, step);
      rows.add_values(o, softmax, s, stage_bytes);
    }
    copies.end(step);
  }

  wait_copies<0>();
  softmax.finish();
  __syncthreads();  // the queries have been read
  const float sink = kIsPlain ? -INFINITY : sink_of(p.scale, p.scale.of(batch * p.heads + head));
  rows.template write<!kIsPlain>(o, softmax, first_row, sink);
}

}  // namespace natten_jax::sm80
