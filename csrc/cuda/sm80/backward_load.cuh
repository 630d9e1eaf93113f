// Functions of the backward kernel that plan and load a key/value tile, and load the queries of a step.
#pragma once

#include "cuda/common/axis_plan.cuh"
#include "cuda/sm80/backward_traits.cuh"

namespace natten_jax::sm80 {

/// Computes the queries that attend to a tile's keys: their bounding box, and the window of queries for each key.
/// Returns false if the tile has no keys in the batch entry. All threads of the CTA must call it.
template <class Traits, bool kIsPlain>
CUTE_DEVICE bool plan_keys(const BackwardParams& p, int batch, int tile, int group,
                           typename Traits::SharedStorage& shared) {
  int first_row = tile % p.parts * Traits::kKeys;
  if (p.is_additional) {
    const int first = tile * Traits::kKeys, tokens = static_cast<int>(p.keys);
    const int4 begin = make_int4(0, 0, 0, 0);
    const int4 end =
        make_int4(p.axis[0].query_local_extent, p.axis[1].query_local_extent, p.axis[2].query_local_extent, 0);
    for (int row = threadIdx.x; row < Traits::kKeys; row += Traits::kThreads) {
      const bool exists = first + row < tokens;
      shared.row_windows[row][0] = make_int4(0, 0, 0, exists ? first + row : -1);
      shared.row_windows[row][1] = exists ? end : begin;
    }
    if (threadIdx.x == 0) {
      shared.box = {begin, end, make_int4(end.y * end.z, end.z, 1, 0)};
      shared.inner_begin = begin;
      shared.inner_end = first + Traits::kKeys <= tokens ? end : begin;
    }
    return true;
  }
  int tile_index[3], residue[3];
  p.axis[2].by_kv_tiles(tile_index[1], tile_index[2], tile / p.parts);
  p.axis[1].by_kv_tiles(tile_index[0], tile_index[1], tile_index[1]);
  p.axis[2].by_dilation(group, residue[2], group);
  p.axis[1].by_dilation(residue[0], residue[1], group);
  const EntryLayout layout(kIsPlain ? nullptr : p.layouts, batch);
  const auto axis_plan = [&](int d) {
    const DeviceAxis& axis = p.axis[d];
    const int index = longest_first(axis, tile_index[d]);
    if (!kIsPlain && p.layouts != nullptr) return KeyAxisPlan(axis, EntryAxis(axis, layout, d), residue[d], index);
    const Origin query_origin = Origin::load(p.origins, d, axis.dilation),
                 kv_origin = Origin::load(p.origins, 3 + d, axis.dilation);
    return KeyAxisPlan(axis, EntryAxis(axis, query_origin, kv_origin), residue[d], index);
  };
  const KeyAxisPlan axes[3] = {axis_plan(0), axis_plan(1), axis_plan(2)};
  for (int d = 0; d < 3; ++d) {
    if (axes[d].kv_begin >= axes[d].kv.local_length) return false;
  }
  for (int row = threadIdx.x; row < Traits::kKeys; row += Traits::kThreads) {
    const int in_tile = first_row + row;
    const int3 position = position_in_tile<&DeviceAxis::by_kv_tile>(p.axis, in_tile);
    const int at[3] = {position.x, position.y, position.z};
    int token = 0;
    bool exists = in_tile < p.kv_tile_tokens;
    int2 window[3];
    CUTE_UNROLL
    for (int d = 0; d < 3; ++d) {
      const int index = axes[d].kv_begin + at[d];
      exists = exists && index < axes[d].kv.local_length;
      token = token * p.axis[d].kv_local_extent + index * p.axis[d].dilation + residue[d];
      window[d] = exists ? axes[d].attending_queries(p.axis[d], index, kIsPlain) : make_int2(0, 0);
    }
    shared.row_windows[row][0] = make_int4(window[0].x, window[1].x, window[2].x, exists ? token : -1);
    shared.row_windows[row][1] = exists ? make_int4(window[0].y, window[1].y, window[2].y, 0) : make_int4(0, 0, 0, 0);
  }
  if (threadIdx.x == 0) {
    int hull_begin[3], hull_end[3], inner_begin[3], inner_end[3], pitch[3], first_token = 0, tokens = 1;
    CUTE_UNROLL
    for (int d = 0; d < 3; ++d) {
      const int2 first_window = axes[d].attending_queries(p.axis[d], axes[d].first, kIsPlain),
                 last_window = axes[d].attending_queries(p.axis[d], axes[d].last, kIsPlain);
      hull_begin[d] = first_window.x;
      hull_end[d] = last_window.y;
      inner_begin[d] = last_window.x;
      inner_end[d] =
          axes[d].is_whole(p.axis[d]) && p.kv_tile_tokens % Traits::kKeys == 0 ? first_window.y : last_window.x;
      first_token = first_token * p.axis[d].query_local_extent + axes[d].query.residue;
    }
    CUTE_UNROLL
    for (int d = 2; d >= 0; --d) {
      pitch[d] = tokens * p.axis[d].dilation;
      tokens *= p.axis[d].query_local_extent;
    }
    shared.box = {make_int4(hull_begin[0], hull_begin[1], hull_begin[2], 0),
                  make_int4(hull_end[0], hull_end[1], hull_end[2], 0),
                  make_int4(pitch[0], pitch[1], pitch[2], first_token)};
    shared.inner_begin = make_int4(inner_begin[0], inner_begin[1], inner_begin[2], 0);
    shared.inner_end = make_int4(inner_end[0], inner_end[1], inner_end[2], 0);
  }
  return true;
}

/// Starts the copies of a tile's keys and values, and computes the tables of rows and masks for its query tiles.
template <class Traits>
CUTE_DEVICE void load_keys(const BackwardParams& p, typename Traits::SharedStorage& shared, const KeyHead& own) {
  for (int row = threadIdx.x; row < kMostQueries; row += Traits::kThreads) {
    shared.rows.template fill<&DeviceAxis::by_q_tile>(p.axis, row, p.q_tile_tokens, shared.box.pitch);
  }
  const auto load = [&](char* tile, const void* data, int head_dim) {
    const int head_bytes = head_dim * static_cast<int>(sizeof(typename Traits::Element));
    Gather<typename Traits::Tile, Traits::kKeys, Traits::kThreads>().copy_tokens(
        shared_address(tile),
        static_cast<const char*>(data) + own.first(p, head_dim) * sizeof(typename Traits::Element),
        p.heads_kv * head_bytes, head_bytes, [&](int row) { return shared.row_windows[row][0].w; });
  };
  load(shared.k, p.key, p.head_dim);
  load(shared.v, p.value, p.head_dim_v);
  commit_copies();
  __syncthreads();
  QueryColumnMask(shared.mask_words, p.axis).template build<kMostQueries>(p.axis, threadIdx.x / 32, Traits::kWarps);
}

/// Starts the copies of a step's rows of Q and dO, and of their logsumexps and deltas.
template <class Traits>
CUTE_DEVICE void load_queries(const BackwardParams& p, typename Traits::SharedStorage& shared, const QueryStep& step,
                              const KeyHead& own, int stage) {
  const int batch = own.batch, head = own.query_head(step);
  using Element = typename Traits::Element;
  using Copy = typename Traits::QueryCopy;
  const Copy copy;
  const TokenBox& box = shared.box;
  const QueryWalk& at = step.walk;
  const int first_token = box.token(at.x, at.y, at.z);
  const bool is_whole = step.column + Traits::kQueries <= p.q_tile_tokens && at.is_inside(p.axis, box.begin, box.end);
  int tokens[Copy::kPasses];
  shared.rows.load(copy, tokens, step.column, first_token);
  std::uint32_t visible = Copy::kAll;
  const std::uint32_t ends = PackedPosition::ends(box.end, at.x, at.y, at.z);
  if (!is_whole) visible = shared.rows.visible(copy, ends, step.column);
  const auto copy_head = [&](char* tile, const void* data, int head_dim) {
    const int head_bytes = head_dim * static_cast<int>(sizeof(Element)), token_bytes = p.heads * head_bytes;
    const char* base =
        static_cast<const char*>(data) + (batch * p.queries * p.heads + head) * static_cast<std::int64_t>(head_bytes);
    copy.copy(shared_address(tile), base, token_bytes, head_bytes, tokens, visible);
  };
  copy_head(shared.q[stage], p.query, p.head_dim);
  copy_head(shared.d_out[stage], p.out_cotangent, p.head_dim_v);
  if (threadIdx.x < Traits::kQueries) {
    const int row = step.column + threadIdx.x;
    const bool exists = is_whole || shared.rows.is_visible(ends, row);
    const std::int64_t token = exists ? first_token + shared.rows.token(row) : 0;
    const std::int64_t i = (batch * p.queries + token) * p.heads + head;
    copy_word_async(shared_address(&shared.logsumexp[stage][threadIdx.x]), p.logsumexp + i, exists);
    copy_word_async(shared_address(&shared.delta[stage][threadIdx.x]), p.delta + i, exists);
  }
  commit_copies();
}

/// Stores the token of each query of a step in shared memory, for `add_query_gradient`.
template <class Traits>
CUTE_DEVICE void store_query_tokens(const BackwardParams& p, typename Traits::SharedStorage& shared,
                                    const QueryStep& step) {
  if (threadIdx.x >= Traits::kQueries) return;
  const TokenBox& box = shared.box;
  const QueryWalk& at = step.walk;
  const int row = step.column + threadIdx.x;
  const bool exists = shared.rows.is_visible(PackedPosition::ends(box.end, at.x, at.y, at.z), row);
  shared.query_tokens[threadIdx.x] = exists ? box.token(at.x, at.y, at.z) + shared.rows.token(row) : -1;
}

}  // namespace natten_jax::sm80
