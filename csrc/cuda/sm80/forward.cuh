// Forward neighborhood attention for any GPU since Ampere. It gathers multi-dimensional tiles from the arrays with
// cp.async, without permuting the arrays first, and multiplies with mma.sync.
//
// A CTA computes a query tile. Each of its warps computes 16 or 32 rows (queries) of the tile: logits, online softmax
// in base 2, and output. Key/value tiles start at the first key in the windows of the query tile. They are processed in
// steps of `kColumns` columns (keys). A warp skips a key/value tile if none of its rows attends to (sees) any of the
// keys. It needs no mask if all rows attend to all keys of the tile. Otherwise it uses a mask bit per logit.
//
// If shared memory suffices, the next step is loaded during the current step. A second CTA on the SM hides the
// remaining latency. The form kWideForm needs almost all shared memory of an SM, so only one CTA runs on each SM. This
// CTA loads steps into a ring of buffers. Its warps need no barrier per step, so they hide each other's latency.
//
// The coordinates and flags of many steps are computed at a time, before these steps. Computing them in each step would
// compete with the products for registers and issue slots.
#pragma once

#include "cuda/sm80/forward_load.cuh"
#include "cuda/sm80/forward_rows.cuh"
#include "cuda/sm80/forward_traits.cuh"

namespace natten_jax::sm80 {

/// Computes the plan of the CTA's query tile, the windows of its rows, and the positions of the columns of key/value
/// tiles. Returns false if the query tile has no queries.
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

/// Starts the copies of the query tile.
template <class Traits>
CUTE_DEVICE void load_query(const ForwardParams& p, typename Traits::SharedStorage& shared, std::int64_t first_row) {
  const int query_bytes = p.head_dim * static_cast<int>(sizeof(typename Traits::Element));
  Gather<typename Traits::Tile, Traits::kRows, Traits::kThreads>().copy_tokens(
      shared_address(shared.q), static_cast<const char*>(p.query) + first_row * query_bytes, p.heads * query_bytes,
      query_bytes, [&](int row) { return shared.row_windows[row][0][3]; });
  commit_copies();
}

/// The forward kernel. If `kIsPlain`, it supports only plain launches (`is_plain`), otherwise all launches.
///
/// A single kernel for all launches would make plain launches slower (H100). Support of scales per head takes 1 to 5%
/// of the time, because such a scale needs a register; a common scale of all heads is a kernel parameter and needs
/// none. Support of layouts per batch entry takes 1 to 3%, because it adds planning code before the step loop, which
/// changes the register allocation in the loop.
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
  const float scale = kIsPlain ? p.scale.uniform : p.scale.for_head(batch * p.heads + head).logits;
  typename WarpRows<Traits>::Softmax softmax(scale * kLog2E);
  for (int step = 0; step < copies.steps; ++step) {
    const std::uint32_t stage_bytes = copies.begin(step);
    const auto visibility = rows.visibility(step);
    typename WarpRows<Traits>::Logits s = {};
    if (visibility.any) {
      if constexpr (Traits::kHasKeyBias) start_at_biases<Traits>(s, shared, step);
      rows.multiply_by_keys(s, query, stage_bytes);
    }
    copies.between(step);
    if (visibility.any) {
      if (!visibility.whole) rows.mask(s, step);
      rows.add_values(o, softmax, s, stage_bytes);
    }
    copies.end(step);
  }

  wait_copies<0>();
  softmax.finish();
  __syncthreads();  // all warps have read the queries, which the output overwrites
  const float sink = kIsPlain ? -INFINITY : sink_of(p.scale, p.scale.for_head(batch * p.heads + head));
  rows.template write<!kIsPlain>(o, softmax, first_row, sink);
}

}  // namespace natten_jax::sm80
