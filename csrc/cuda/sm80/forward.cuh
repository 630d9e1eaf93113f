// Forward neighborhood attention for any GPU since Ampere: cp.async gathers of multi-dimensional tiles from the natural
// layout, mma.sync.
//
// A CTA owns a query tile, a warp 16 or 32 of its rows: logits, online softmax in base 2, output. Key/value tiles
// start at the first key that the query tile's windows hold and are read in steps of a few columns. A tile that every
// row sees whole is not masked; the others take one bit per element. Values are loaded while logits are computed, and
// the next step's keys while values are used; the other CTAs of the multiprocessor fill the gaps.
#pragma once

#include "cuda/common/column_mask.cuh"
#include "cuda/sm80/gather.cuh"
#include "cuda/sm80/online_softmax.cuh"
#include "cuda/sm80/products.cuh"
#include "cuda/sm80/tile_plan.cuh"

namespace natten_jax::sm80 {

template <class Element_, class Product_, int kHeadDim_, int kColumns_, int kWarps_ = 4>
struct ForwardTraits {
  using Element = Element_;
  using Product = Product_;
  static constexpr int kHeadDim = kHeadDim_;  // at least head_dim and head_dim_v
  static constexpr int kColumns = kColumns_;  // keys of a step
  static constexpr int kWarps = kWarps_;
  static constexpr int kThreads = 32 * kWarps;
  using Tile = SharedTile<kHeadDim * sizeof(Element)>;
  static constexpr int kRowBlocks = Tile::kRowBytes <= 256 ? 2 : 1;  // of 16 rows, in a warp
  static constexpr int kRows = 16 * kRowBlocks * kWarps;
  static constexpr bool kQueryInRegisters = Tile::kRowBytes <= 128;

  struct SharedStorage {
    alignas(128) char q[kRows * Tile::kRowBytes];
    alignas(128) char k[kColumns * Tile::kRowBytes];
    alignas(128) char v[kColumns * Tile::kRowBytes];
    TilePlan plan;
    int4 row_windows[kRows][2];  // first key seen (x, y, z) and the row's token, or -1; end of the keys seen
    TileRows columns;            // of key/value tiles
    std::uint32_t mask_words[ColumnMask::capacity(TileRows::kMost)];
  };
};

/// A few columns of a key/value tile, or a few additional keys.
struct Step {
  int x, y, z;  // first key of the tile
  int column;   // first column of the step, or the additional keys before it
  bool is_window;

  CUTE_DEVICE Step next(const ForwardParams& p, const TilePlan& plan, int columns) const {
    Step step = *this;
    step.column += columns;
    if (is_window && step.column >= p.kv_tile_tokens) {
      step.column = 0;
      step.z += p.axis[2].kv_tile;
      const bool ends_line = step.z >= plan.hull_end.z;
      step.z = ends_line ? plan.hull_begin.z : step.z;
      step.y += ends_line ? p.axis[1].kv_tile : 0;
      const bool ends_plane = step.y >= plan.hull_end.y;
      step.y = ends_plane ? plan.hull_begin.y : step.y;
      step.x += ends_plane ? p.axis[0].kv_tile : 0;
      step.is_window = step.x < plan.hull_end.x;
    }
    return step;
  }

  /// Whether the tile lies between `begin` and `end` whole.
  CUTE_DEVICE bool is_inside(const ForwardParams& p, int4 begin, int4 end) const {
    return x >= begin.x && y >= begin.y && z >= begin.z && x + p.axis[0].kv_tile <= end.x &&
           y + p.axis[1].kv_tile <= end.y && z + p.axis[2].kv_tile <= end.z;
  }

  CUTE_DEVICE bool exists(const ForwardParams& p) const { return is_window || column < p.additional_kv; }
};

/// Starts to copy the keys or values of a step.
///
/// Args:
///   bases: of the head's keys or values, and of the additional ones.
///   head_dim: of those.
template <class Traits>
CUTE_DEVICE void load_step(const ForwardParams& p, const typename Traits::SharedStorage& shared, const Step& step,
                           const char* const (&bases)[2], int head_dim, std::uint32_t tile) {
  const Gather<typename Traits::Tile, Traits::kColumns, Traits::kThreads> gather;
  constexpr int kPasses = decltype(gather)::kPasses;
  constexpr std::uint32_t kAll = static_cast<std::uint32_t>((std::uint64_t(1) << kPasses) - 1);
  const TilePlan& plan = shared.plan;
  const int head_bytes = head_dim * static_cast<int>(sizeof(typename Traits::Element));
  const int token_bytes = head_bytes * p.heads_kv;
  int tokens[kPasses];
  std::uint32_t visible = kAll;
  const char* base = bases[step.is_window ? 0 : 1];
  if (step.is_window) {
    const int4 pitch = plan.key_pitch, end = plan.hull_end;
    const int first_token = step.x * pitch.x + step.y * pitch.y + step.z * pitch.z + pitch.w;
    const int column = step.column + gather.first;
    shared.columns.load(tokens, column);
    base += static_cast<std::int64_t>(first_token) * token_bytes;
    if (step.column + Traits::kColumns > p.kv_tile_tokens || !step.is_inside(p, plan.hull_begin, end)) {
      visible = shared.columns.template visible<kPasses>(end, step.x, step.y, step.z, column, p.kv_tile_tokens);
    }
  } else {
    CUTE_UNROLL
    for (int i = 0; i < kPasses; ++i) {
      tokens[i] = step.column + gather.first + i;
      if (tokens[i] >= p.additional_kv) visible &= ~(1u << i);
    }
  }
  gather.copy(tile, base, token_bytes, head_bytes, tokens, visible);
  commit_copies();
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 2)
    natten_jax_sm80_fna_forward(const __grid_constant__ ForwardParams p) {
  using Element = typename Traits::Element;
  using Product = typename Traits::Product;
  using Tile = typename Traits::Tile;
  constexpr int kRows = Traits::kRows, kColumns = Traits::kColumns, kThreads = Traits::kThreads;
  constexpr int kRowBlocks = Traits::kRowBlocks;
  constexpr int kHeadSteps = Traits::kHeadDim / Product::kStep;
  constexpr float kLog2e = 1.4426950408889634f;
  extern __shared__ __align__(128) char raw[];
  auto& shared = *reinterpret_cast<typename Traits::SharedStorage*>(raw);
  const TilePlan& plan = shared.plan;
  const int lane4 = threadIdx.x % 4, warp_row = threadIdx.x / 32 * 16 * kRowBlocks;
  const int row0 = warp_row + threadIdx.x % 32 / 4;
  const std::uint32_t q = shared_address(shared.q), k = shared_address(shared.k), v = shared_address(shared.v);

  const QueryTile tile = find_tile(p, blockIdx.x);
  for (int d = 0; d < 3; ++d) {
    if (tile.axes[d].q_begin >= tile.axes[d].queries) return;
  }
  if (threadIdx.x == 0) share_plan<Element, kColumns>(p, tile, shared.plan);
  // Rows past the query tile stand for its first; columns past the key/value tile are in no window.
  for (int row = threadIdx.x; row < kRows; row += kThreads) {
    const bool exists = row < p.q_tile_tokens;
    const int line = (exists ? row : 0) / p.axis[2].q_tile;
    const int at[3] = {line / p.axis[1].q_tile, line % p.axis[1].q_tile, (exists ? row : 0) % p.axis[2].q_tile};
    const int2 x = tile.seen(p, 0, at[0]), y = tile.seen(p, 1, at[1]), z = tile.seen(p, 2, at[2]);
    shared.row_windows[row][0] = make_int4(x.x, y.x, z.x, exists ? tile.token(p, at) : -1);
    shared.row_windows[row][1] = make_int4(x.y, y.y, z.y, 0);
  }
  __syncthreads();
  for (int column = threadIdx.x; column < TileRows::kMost; column += kThreads) {
    shared.columns.fill(column, p.kv_tile_tokens, p.axis[1].kv_tile, p.axis[2].kv_tile, plan.key_pitch);
  }
  const int query_bytes = p.head_dim * static_cast<int>(sizeof(Element));
  Gather<Tile, kRows, kThreads>().copy_tokens(
      q,
      static_cast<const char*>(p.query) +
          (tile.batch * p.queries * p.heads + tile.head) * static_cast<std::int64_t>(query_bytes),
      p.heads * query_bytes, query_bytes, [&](int row) { return shared.row_windows[row][0].w; });
  commit_copies();
  __syncthreads();

  const int4 begin = plan.hull_begin, end = plan.hull_end;
  Step step{begin.x, begin.y, begin.z, 0, begin.x < end.x && begin.y < end.y && begin.z < end.z};
  bool exists = step.exists(p);
  if (exists) load_step<Traits>(p, shared, step, plan.keys, p.head_dim, k);
  const ColumnMask column_mask(shared.mask_words, p.axis);
  if (plan.needs_mask) {
    column_mask.template build<TileRows::kMost>(p.axis, shared.columns.coordinates, threadIdx.x, kThreads);
  }

  const typename Product::template ReadA<Tile> read_q(q, warp_row);
  const typename Product::template ReadB<Tile> read_k(k, 0);
  const typename Product::template ReadTransposedB<Tile> read_v(v, 0);
  typename Product::A query[Traits::kQueryInRegisters ? kRowBlocks : 1][kHeadSteps];
  float o[kRowBlocks][Traits::kHeadDim / 8][4] = {};
  // Negating the scale is negating the logits; a scale of zero makes them zero.
  const float logit_sign = p.scale < 0.f ? -1.f : p.scale == 0.f ? 0.f : 1.f;
  OnlineSoftmax<kRowBlocks> softmax((p.scale == 0.f ? 1.f : fabsf(p.scale)) * kLog2e);

  if (Traits::kQueryInRegisters) {
    if (exists) {
      wait_copies<1>();
    } else {
      wait_copies<0>();
    }
    __syncthreads();
    CUTE_UNROLL
    for (int m = 0; m < kRowBlocks; ++m) {
      CUTE_UNROLL
      for (int step = 0; step < kHeadSteps; ++step) read_q(query[m][step], 16 * m, step);
    }
  }

  while (exists) {
    wait_copies<0>();
    __syncthreads();  // these keys are there; the values before them have been used
    load_step<Traits>(p, shared, step, plan.values, p.head_dim_v, v);
    const Step next = step.next(p, plan, kColumns);
    exists = next.exists(p);

    // Which elements are hidden.
    const bool is_whole = step.is_window ? step.column + kColumns <= p.kv_tile_tokens &&
                                               step.is_inside(p, plan.inner_begin, plan.inner_end)
                                         : step.column + kColumns <= p.additional_kv;
    std::uint32_t visible[kRowBlocks][2];
    bool sees_any = true;
    if (!is_whole && step.is_window) {
      std::uint32_t any = 0;
      const int4 begin = make_int4(step.x, step.y, step.z, 0);
      CUTE_UNROLL
      for (int i = 0; i < 2 * kRowBlocks; ++i) {
        const int4* seen = shared.row_windows[row0 + 8 * i];
        visible[i / 2][i % 2] = column_mask.row(p.axis, seen[0], seen[1], begin, lane4) >> step.column / 4;
        any |= visible[i / 2][i % 2];
      }
      if constexpr (kColumns < TileRows::kMost) any &= (1u << kColumns / 4) - 1;
      sees_any = __any_sync(0xffffffffu, any != 0);
    } else if (!is_whole) {
      CUTE_UNROLL
      for (int i = 0; i < 2 * kRowBlocks; ++i) {
        visible[i / 2][i % 2] = ColumnMask::first(p.additional_kv - step.column, lane4);
      }
    }

    float s[kRowBlocks][kColumns / 8][4] = {};
    if (sees_any) {
      accumulate<Product, kRowBlocks, kColumns / 16, kHeadSteps>(
          s,
          [&](auto& a, int m, int step) __attribute__((always_inline)) {
            if constexpr (Traits::kQueryInRegisters) {
              a = query[m][step];
            } else {
              read_q(a, 16 * m, step);
            }
          },
          [&](auto& b, int n, int step) __attribute__((always_inline)) { read_k(b, 16 * n, step); });
    }
    wait_copies<0>();
    __syncthreads();  // these values are there; these keys have been used
    if (exists) load_step<Traits>(p, shared, next, plan.keys, p.head_dim, k);
    if (sees_any) {
      if (logit_sign <= 0.f) {
        CUTE_UNROLL
        for (int e = 0; e < kRowBlocks * kColumns / 2; ++e) {
          s[e / (kColumns / 2)][e / 4 % (kColumns / 8)][e % 4] *= logit_sign;
        }
      }
      if (!is_whole) {
        CUTE_UNROLL
        for (int m = 0; m < kRowBlocks; ++m) {
          CUTE_UNROLL
          for (int e = 0; e < kColumns / 2; ++e) {
            if (!(visible[m][e / 2 % 2] & 1u << (e / 4 * 2 + e % 2))) s[m][e / 4][e % 4] = -INFINITY;
          }
        }
      }
      softmax.update(s, o);
      accumulate<Product, kRowBlocks, Traits::kHeadDim / 16, kColumns / Product::kStep>(
          o, [&](auto& a, int m, int step) __attribute__((always_inline)) { a = Product::operand(s[m], step); },
          [&](auto& b, int n, int step) __attribute__((always_inline)) { read_v(b, 16 * n, step); });
    }
    step = next;
  }

  // Every warp writes its rows over those of the query, then whole rows to memory.
  wait_copies<0>();
  softmax.finish();
  __syncthreads();
  CUTE_UNROLL
  for (int i = 0; i < 2 * kRowBlocks; ++i) {
    const int row = row0 + 8 * i;
    const int token = shared.row_windows[row][0].w;
    if (lane4 == 0 && token >= 0) {
      p.logsumexp[(tile.batch * p.queries + token) * p.heads + tile.head] = softmax.logsumexp(i / 2, i % 2);
    }
    const float normalisation = softmax.normalisation(i / 2, i % 2);
    CUTE_UNROLL
    for (int n = 0; n < Traits::kHeadDim / 8; ++n) {
      const int byte = (8 * n + 2 * lane4) * sizeof(Element);
      const float* pair = &o[i / 2][n][i % 2 * 2];
      Product::store_pair(q + Tile::offset(row, byte / 16) + byte % 16, pair[0] * normalisation,
                          pair[1] * normalisation);
    }
  }
  __syncwarp();
  char* out = static_cast<char*>(p.out) + (tile.batch * p.queries * p.heads + tile.head) * p.head_dim_v *
                                              static_cast<std::int64_t>(sizeof(Element));
  const int out_bytes = p.head_dim_v * static_cast<int>(sizeof(Element));
  for (int i = threadIdx.x % 32; i < 16 * kRowBlocks * Tile::kChunks; i += 32) {
    const int row = warp_row + i / Tile::kChunks, chunk = i % Tile::kChunks;
    const int token = shared.row_windows[row][0].w;
    if (token < 0 || chunk * 16 >= out_bytes) continue;
    const uint4 data = load_chunk(q + Tile::offset(row, chunk));
    *reinterpret_cast<uint4*>(out + static_cast<std::int64_t>(token) * p.heads * out_bytes + chunk * 16) = data;
  }
}

}  // namespace natten_jax::sm80
