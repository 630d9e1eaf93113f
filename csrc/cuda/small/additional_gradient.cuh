// Gradients of additional keys and values, to which all queries attend. A warp computes partial gradients of 16
// additional keys and values: sums over a part of the queries. A second kernel adds up the partial gradients in a fixed
// order, without atomics. So results are deterministic, and do not depend on other batch entries.
#pragma once

#include "cuda/small/key_value_gradient.cuh"

namespace natten_jax::small {

/// Layout of a stage in shared memory. A stage contains Q, dO and statistics of the queries that a warp loads at a
/// time. The queries form pairs of groups of eight, with the layout of a box that TMA loads (ColumnRows).
template <int kHeadDim>
struct QueryStage {
  using Rows = RowTile<kHeadDim>;
  using Tile = typename Rows::Tile;
  static constexpr int kPairs = additional_pairs_at_once(kHeadDim), kQueries = kPairs * 2 * kColumns;
  static_assert(2 * kColumns == kRows && kQueries <= 32);
  static constexpr int kSecond = kPairs * Rows::kBytes;  // distance in bytes from Q to dO
  static constexpr int kStatistics = 2 * kSecond, kBytes = kStatistics + kQueries * kStatisticsBytes;

  /// Plan of a warp. All stages have the same plan, because all queries of a stage attend to the additional keys.
  CUTE_DEVICE static TilePlan plan() {
    const int lane = threadIdx.x % 32, in_group = lane % kColumns, slow = lane / 16, fast = lane / 8 % 2;
    TilePlan result{};
    result.pairs = kPairs;
    result.lanes = {Tile::offset(slow * kColumns + in_group, fast), Tile::offset(fast * kColumns + in_group, slow)};
    result.statistic = kStatistics + lane % 4 * 2 * kStatisticsBytes;
    result.next_statistic = kStatisticsBytes;
    result.next_group = kColumns * kStatisticsBytes;
    result.statistic_of_column = kStatistics + lane % 16 * kStatisticsBytes;
    result.has_rows = true;
    return result;
  }
};

/// A CTA's shared memory.
template <int kHeadDim>
struct AdditionalShared {
  using Stage = QueryStage<kHeadDim>;
  // Each warp has two stages, so that it loads the next queries while it computes.
  alignas(128) char stages[kAdditionalWarps][2][(Stage::kBytes + 127) / 128 * 128];
  alignas(128) char keys[Stage::Rows::kBytes];
  alignas(128) char values[Stage::Rows::kBytes];
  // Offsets and masks of pairs of groups, as `for_pairs` reads them. Two more offsets are allocated, because
  // `for_pairs` prefetches past the end.
  alignas(8) std::uint32_t offsets[Stage::kPairs + 2];
  std::uint16_t masks[2 * 32];
  // Array indices of keys and queries, in the format of Tables::row_indices.
  alignas(8) int key_indices[kRows];
  alignas(8) int query_indices[kAdditionalWarps][32];
};

template <class Element, int kHeadDim>
// The second launch bound is a minimum of one CTA per SM. Without it, the compiler allocated only 32 registers per
// thread for heads of 128, and spilled.
__global__ void __launch_bounds__(32 * kAdditionalWarps, 1)
    natten_jax_small_additional_gradient(const __grid_constant__ AdditionalParams p) {
  using Stage = QueryStage<kHeadDim>;
  using Rows = typename Stage::Rows;
  using Operand = RowOperand<Element, kHeadDim>;
  extern __shared__ __align__(1024) char raw[];
  auto& shared = *reinterpret_cast<AdditionalShared<kHeadDim>*>(raw);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int id, split, tile_number, batch, head_kv;
  p.by_splits(id, split, blockIdx.x);
  p.by_tiles(id, tile_number, id);
  p.by_heads_kv(batch, head_kv, id);

  for (int i = threadIdx.x; i < Stage::kPairs + 2; i += blockDim.x) shared.offsets[i] = i * Rows::kBytes;
  for (int i = threadIdx.x; i < 2 * 32; i += blockDim.x) shared.masks[i] = 0;
  if (threadIdx.x < kRows) {
    const int key = tile_number * kRows + threadIdx.x;
    shared.key_indices[index_of_row(threadIdx.x)] = key < p.additional_kv ? key * p.heads_kv : -1;
  }
  __syncthreads();
  const int additional_row = batch * p.additional_kv * p.heads_kv + head_kv;
  const auto copy_rows = [](const int* indices, const void* array, int first, int width, std::uint32_t to) {
    Rows::copy(reinterpret_cast<const int2*>(indices), row_of(array, first, width), width, to);
  };
  if (warp == 0) {
    copy_rows(shared.key_indices, p.keys, additional_row, p.head_dim, shared_address(shared.keys));
  } else if (warp == 1) {
    copy_rows(shared.key_indices, p.values, additional_row, p.head_dim_v, shared_address(shared.values));
  }
  commit_copies();
  wait_copies<0>();
  __syncthreads();
  const int part = split * kAdditionalWarps + warp;
  if (part >= p.parts) return;

  // In each token, the query heads that share a key/value head are consecutive.
  const int heads_per_kv = p.heads / p.heads_kv, first_row = batch * p.queries * p.heads + head_kv * heads_per_kv;
  const int begin = part * p.columns_of_part, end = min(begin + p.columns_of_part, p.queries * heads_per_kv);
  int* indices = shared.query_indices[warp];
  const auto load = [&](int column, std::uint32_t stage) {
    column += lane;
    int token, head;
    p.by_heads_per_kv(token, head, column);
    __syncwarp();
    const int index = column < end ? token * p.heads + head : -1;
    indices[lane / kRows * kRows + index_of_row(lane % kRows)] = index;
    __syncwarp();
    CUTE_UNROLL
    for (int pair = 0; pair < Stage::kPairs; ++pair) {
      const auto copy_pair = [&](const void* array, int width, std::uint32_t to) {
        copy_rows(indices + pair * kRows, array, first_row, width, to + pair * Rows::kBytes);
      };
      copy_pair(p.query, p.head_dim, stage);
      copy_pair(p.out_cotangent, p.head_dim_v, stage + Stage::kSecond);
    }
    // For rows past the last query, Q, dO and statistics are set to zero, so these rows do not change the sums.
    if (lane < Stage::kQueries) {
      copy_chunk(stage + Stage::kStatistics + lane * kStatisticsBytes,
                 reinterpret_cast<const char*>(p.statistics + first_row + max(index, 0)), index < 0 ? 0 : 16);
    }
  };

  // All query heads of the CTA have the same scale, because query heads do not share key/value heads if scales are per
  // head.
  const float exponent_scale = p.scale.for_head(batch * p.heads + head_kv * heads_per_kv).logits * kLog2E;
  TilePlan tile = Stage::plan();
  Tables tables{};
  tables.offsets = shared.offsets;
  tables.masks = shared.masks + lane;
  tables.second = Stage::kSecond;
  KeyValueSums<Element, kHeadDim, false> sums;
  const Operand keys(shared_address(shared.keys)), values(shared_address(shared.values));
  std::uint32_t stage = shared_address(shared.stages[warp][0]), other = shared_address(shared.stages[warp][1]);
  if (begin < end) load(begin, stage);
  commit_copies();
  CUTE_NO_UNROLL
  for (int column = begin; column < end; column += Stage::kQueries) {
    __syncwarp();
    if (column + Stage::kQueries < end) load(column + Stage::kQueries, other);
    commit_copies();
    wait_copies<1>();
    __syncwarp();
    KeyBiasSums none;
    sums.template add<ColumnRows<kHeadDim, true>, Feature::kNone>(none, keys, values, exponent_scale, tile, tables,
                                                                  stage);
    const std::uint32_t done = stage;
    stage = other;
    other = done;
  }

  const int width = p.head_dim + p.head_dim_v;
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    const int key = tile_number * kRows + lane / 4 + 8 * r;
    if (key >= p.additional_kv) continue;
    const std::int64_t row = ((std::int64_t{part} * p.batch + batch) * p.additional_kv + key) * p.heads_kv + head_kv;
    float* at = p.sums + row * width + lane % 4 * 2;
    CUTE_UNROLL
    for (int i = 0; i < kHeadDim / 8; ++i) {
      const auto two = [&](const float (&quad)[4]) { return make_float2(quad[2 * r], quad[2 * r + 1]); };
      if (8 * i < p.head_dim) *reinterpret_cast<float2*>(at + 8 * i) = two(sums.key_sums[i]);
      if (8 * i < p.head_dim_v) *reinterpret_cast<float2*>(at + p.head_dim + 8 * i) = two(sums.value_sums[i]);
    }
  }
}

/// Adds up the partial gradients. A thread computes two elements of the gradient of a key or a value.
template <class Element>
__global__ void __launch_bounds__(kAdditionalSumThreads)
    natten_jax_small_additional_gradient_sum(const __grid_constant__ AdditionalParams p) {
  const int width = p.head_dim + p.head_dim_v;
  const std::int64_t rows = std::int64_t{p.batch} * p.additional_kv * p.heads_kv, pairs = rows * width / 2;
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= pairs) return;
  float2 sum = {};
#pragma unroll 8
  for (int part = 0; part < p.parts; ++part) {
    const float2 partial = reinterpret_cast<const float2*>(p.sums)[part * pairs + i];
    sum.x += partial.x;
    sum.y += partial.y;
  }
  const std::int64_t row = 2 * i / width;
  const int element = static_cast<int>(2 * i - row * width);
  const bool is_key = element < p.head_dim;
  const std::int64_t batch_rows = std::int64_t{p.additional_kv} * p.heads_kv, batch = row / batch_rows,
                     head = row % p.heads_kv;
  const float factor = is_key ? p.scale.for_head(batch * p.heads + head * (p.heads / p.heads_kv)).logits : 1.f;
  void* gradient = is_key ? p.keys_gradient : p.values_gradient;
  const std::int64_t at = is_key ? row * p.head_dim + element : row * p.head_dim_v + element - p.head_dim;
  static_cast<std::uint32_t*>(gradient)[at / 2] = pack<Element>(sum.x * factor, sum.y * factor);
}

}  // namespace natten_jax::small
