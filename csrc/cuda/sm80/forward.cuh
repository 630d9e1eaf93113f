// Forward neighborhood attention for any GPU since Ampere: cp.async gathers of multi-dimensional tiles from the natural
// layout, mma.sync.
//
// A CTA owns a query tile, a warp 16 or 32 of its rows: logits, online softmax in base 2, output. Key/value tiles
// start at the first key that the query tile's windows hold and are read in steps of a few columns. A tile that a
// warp's rows see whole is not masked, one that they do not see is skipped, and the others take one bit per element.
// The next step is loaded while this one is used, as far as shared memory goes; the other CTA of the multiprocessor
// fills the gaps. Where one CTA may have all of a large shared memory, it takes the place of two: steps pass through a
// ring of buffers, and its warps, which need not keep step, fill each other's gaps. What the loop needs to know of a
// step is worked out ahead, many steps at a time: registers and issue slots are what the products compete for.
#pragma once

#include "cuda/common/column_mask.cuh"
#include "cuda/sm80/copy_ring.cuh"
#include "cuda/sm80/gather.cuh"
#include "cuda/sm80/key_steps.cuh"
#include "cuda/sm80/online_softmax.cuh"
#include "cuda/sm80/products.cuh"
#include "cuda/sm80/tile_plan.cuh"

namespace natten_jax::sm80 {

constexpr int kMostColumns = 128;  // of a key/value tile

template <class Element_, class Product_, int kHeadDim_, int kColumns_, int kStages_, int kWarps_ = 4>
struct ForwardTraits {
  using Element = Element_;
  using Product = Product_;
  static constexpr int kHeadDim = kHeadDim_;  // at least head_dim and head_dim_v
  static constexpr int kColumns = kColumns_;  // keys of a step
  static constexpr int kWarps = kWarps_;
  static constexpr int kThreads = 32 * kWarps;
  using Tile = SharedTile<kHeadDim * sizeof(Element)>;
  static constexpr int kRowBlocks = Tile::kRowBytes <= 256 ? 2 : 1;  // of 16 rows, in a warp
  static constexpr int kStages = kStages_;  // steps in shared memory; 0: keys and values share one buffer
  static constexpr bool kIsRing = kStages > 2;
  static constexpr int kRows = 16 * kRowBlocks * kWarps;
  static constexpr bool kQueryInRegisters = Tile::kRowBytes <= 128;

  using KeyCopy = Gather<Tile, kColumns, kThreads>;

  struct SharedStorage {
    alignas(128) char q[kRows * Tile::kRowBytes];
    alignas(128) char keys_and_values[kStages == 0 ? 1 : 2 * kStages][kColumns * Tile::kRowBytes];
    TilePlan plan;
    CopyRing<kIsRing ? kStages : 1, kThreads> ring;  // of steps, where they are one
    alignas(
        16) int row_windows[kRows][2][4];  // first key seen (x, y, z) and the row's token, or -1; end of the keys seen
    TileRows<KeyCopy> columns;             // of key/value tiles
    KeySteps<kThreads> steps;
    SeenBox warp_boxes[kWarps];
    float subtracted[kRows];  // from a row's logits, where these are large
    std::uint32_t mask_words[KeyColumnMask::capacity(kMostColumns)];
  };
};

/// Starts to copy the keys and values of a step, or either.
template <class Traits, bool kKeys, bool kValues>
CUTE_DEVICE void load_step(const ForwardParams& p, const typename Traits::SharedStorage& shared, int step,
                           std::uint32_t k, std::uint32_t v) {
  using Steps = KeySteps<Traits::kThreads>;
  using Copy = typename Traits::KeyCopy;
  const Copy copy;
  const TilePlan& plan = shared.plan;
  const int place = shared.steps.places[step % Steps::kCapacity], column = place >> 3;
  const int4 at = shared.steps.tiles[step % Steps::kCapacity];
  const bool is_window = (place & Steps::kWindow) != 0;
  int tokens[Copy::kPasses];
  if (is_window) {
    shared.columns.load(copy, tokens, column, at.w);
  } else {
    CUTE_UNROLL
    for (int i = 0; i < Copy::kPasses; ++i) tokens[i] = at.w + copy.first + i * Copy::kStride;
  }
  const auto copy_both = [&](std::uint32_t visible) __attribute__((always_inline)) {
    const auto copy_one = [&](std::uint32_t tile, const char* const(&bases)[2], int head_dim) {
      const int head_bytes = head_dim * static_cast<int>(sizeof(typename Traits::Element));
      copy.copy(tile, bases[is_window ? 0 : 1], head_bytes * p.heads_kv, head_bytes, tokens, visible);
    };
    if (kKeys) copy_one(k, plan.keys, p.head_dim);
    if (kValues) copy_one(v, plan.values, p.head_dim_v);
  };
  if (place & Steps::kInside) {
    copy_both(Copy::kAll);
  } else if (is_window) {
    copy_both(shared.columns.visible(copy, quad(plan.hull_end), at.x, at.y, at.z, column, p.kv_tile_tokens));
  } else {
    std::uint32_t visible = 0;
    CUTE_UNROLL
    for (int i = 0; i < Copy::kPasses; ++i) visible |= static_cast<std::uint32_t>(tokens[i] < p.additional_kv) << i;
    copy_both(visible);
  }
  commit_copies();
}

/// One function, since output and softmax stay in registers from step to step of one schedule of copies and barriers.
template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 8 / Traits::kWarps)
    natten_jax_sm80_fna_forward(const __grid_constant__ ForwardParams p) {
  using Element = typename Traits::Element;
  using Product = typename Traits::Product;
  using Tile = typename Traits::Tile;
  using Steps = KeySteps<Traits::kThreads>;
  constexpr int kRows = Traits::kRows, kColumns = Traits::kColumns, kThreads = Traits::kThreads;
  constexpr int kRowBlocks = Traits::kRowBlocks, kStages = Traits::kStages;
  constexpr int kAhead = Traits::kIsRing ? kStages / 2 : 1;  // steps that are loaded ahead
  constexpr int kHeadSteps = Traits::kHeadDim / Product::kStep;
  constexpr std::uint32_t kStageBytes = kColumns * Tile::kRowBytes;
  extern __shared__ __align__(128) char raw[];
  auto& shared = *reinterpret_cast<typename Traits::SharedStorage*>(raw);
  const TilePlan& plan = shared.plan;
  const int lane4 = threadIdx.x % 4, warp_row = threadIdx.x / 32 * 16 * kRowBlocks;
  const int row0 = warp_row + threadIdx.x % 32 / 4;
  const std::uint32_t q = shared_address(shared.q);
  const std::uint32_t k = shared_address(shared.keys_and_values), v = k + kStages * kStageBytes;

  if constexpr (Traits::kIsRing) shared.ring.initialise();
  int batch, head;
  {
    const int d = planned_dimension(), dilation = p.axis[d].dilation;
    const AxisPlan own = plan_axis(p, Origin::load(p.origins, d, dilation), Origin::load(p.origins, 3 + d, dilation),
                                   blockIdx.x, batch, head);
    if (__any_sync(0xffffffffu, own.q_begin >= own.queries)) return;
    if (threadIdx.x >= kThreads - 32) share_plan<Element, kColumns>(p, own, batch, head, shared.plan);
    const int row = warp_row + threadIdx.x % (16 * kRowBlocks);
    plan_row(p, own, row, shared.row_windows[row][0], shared.row_windows[row][1], shared.warp_boxes[threadIdx.x / 32]);
    for (int column = threadIdx.x; column < kMostColumns; column += kThreads) {
      shared.columns.fill(column, p.kv_tile_tokens, p.axis[1].by_kv_tile, p.axis[2].by_kv_tile, key_pitch(p));
    }
  }
  __syncthreads();
  const int query_bytes = p.head_dim * static_cast<int>(sizeof(Element));
  Gather<Tile, kRows, kThreads>().copy_tokens(
      q,
      static_cast<const char*>(p.query) + (batch * p.queries * p.heads + head) * static_cast<std::int64_t>(query_bytes),
      p.heads * query_bytes, query_bytes, [&](int row) { return shared.row_windows[row][0][3]; });
  commit_copies();

  const int steps = plan.steps;
  shared.steps.fill(p, plan, kColumns, 0);
  const KeyColumnMask column_mask(shared.mask_words, p.axis);
  if (plan.needs_mask) column_mask.template build<kMostColumns>(p.axis, threadIdx.x / 32, Traits::kWarps);
  __syncthreads();
  for (int step = 0; step < min(steps, kAhead); ++step) {
    load_step<Traits, true, (kStages > 1)>(p, shared, step, k + step * kStageBytes, v + step * kStageBytes);
    if constexpr (Traits::kIsRing) shared.ring.arrive_copies(step);
  }

  const typename Product::template ReadA<Tile> read_q(q, warp_row);
  const typename Product::template ReadB<Tile> read_k(k, 0);
  const typename Product::template ReadTransposedB<Tile> read_v(v, 0);
  typename Product::A query[Traits::kQueryInRegisters ? kRowBlocks : 1][kHeadSteps];
  float o[kRowBlocks][Traits::kHeadDim / 8][4] = {};
  OnlineSoftmax<kRowBlocks> softmax((p.scale == 0.f ? 1.f : fabsf(p.scale)) * kLog2E);
  const auto subtracted = [&](int i) -> float& { return shared.subtracted[row0 + 8 * i]; };

  if (p.scale <= 0.f) {
    // Negating the scale is negating the queries; a scale of zero makes them zero.
    wait_copies<0>();
    __syncthreads();
    for (int i = threadIdx.x; i < kRows * Tile::kRowBytes / 4; i += kThreads) {
      store_word(q + 4 * i, p.scale == 0.f ? 0 : load_word(q + 4 * i) ^ ElementTraits<Element>::kSigns);
    }
    __syncthreads();
  }
  if (Traits::kQueryInRegisters) {
    if (steps > 0) {
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

  int stage = 0;
  for (int step = 0; step < steps; ++step) {
    const int next = step + kAhead;
    if constexpr (!Traits::kIsRing) {
      wait_copies<0>();
      __syncthreads();  // this step's keys are there; what is loaded next has been used
    }
    const std::uint32_t stage_bytes = kStages < 2 ? 0 : (Traits::kIsRing ? step % kStages : stage) * kStageBytes;
    stage ^= 1;
    if (next % kThreads == 0) {
      shared.steps.fill(p, plan, kColumns, next);
      __syncthreads();
    }
    if constexpr (Traits::kIsRing) {
      if (next < steps) {
        shared.ring.wait_free(next);
        const std::uint32_t next_bytes = next % kStages * kStageBytes;
        load_step<Traits, true, true>(p, shared, next, k + next_bytes, v + next_bytes);
        shared.ring.arrive_copies(next);
      }
      shared.ring.wait_full(step);
    } else if (kStages == 1) {
      load_step<Traits, false, true>(p, shared, step, k, v);
    } else if (kStages == 2 && next < steps) {
      load_step<Traits, true, true>(p, shared, next, k + stage * kStageBytes, v + stage * kStageBytes);
    }

    // Whether this warp's rows see the step's keys: none, all or some.
    const int place = shared.steps.places[step % Steps::kCapacity];
    bool is_whole = (place & Steps::kWhole) != 0, sees_any = true;
    if ((place & (Steps::kWhole | Steps::kWindow)) == Steps::kWindow) {
      const int4 at = shared.steps.tiles[step % Steps::kCapacity];
      const auto& box = shared.warp_boxes[threadIdx.x / 32];
      sees_any = box.overlaps(p, at);
      is_whole = (place >> 3) + kColumns <= p.kv_tile_tokens && box.contains(p, at);
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
          [&](auto& b, int n, int step) __attribute__((always_inline)) { read_k(b, 16 * n, step, stage_bytes); });
    }
    if (kStages < 2) {
      if (kStages == 0) {
        __syncthreads();  // these keys have been used
        load_step<Traits, false, true>(p, shared, step, k, v);
      }
      wait_copies<0>();
      __syncthreads();  // these values are there; these keys have been used
      if (kStages == 1 && step + 1 < steps) load_step<Traits, true, false>(p, shared, step + 1, k, v);
    }
    if (sees_any) {
      if (!is_whole) {
        // A loop, since the compiler would predicate instructions that it could jump over, and they would take issue
        // slots in every step.
        const int4 at = shared.steps.tiles[step % Steps::kCapacity];
        std::uint32_t visible[2 * kRowBlocks];
#pragma unroll 1
        for (int i = 2 * kRowBlocks - 1; i >= 0; --i) {
          CUTE_UNROLL
          for (int j = 2 * kRowBlocks - 1; j > 0; --j) visible[j] = visible[j - 1];
          if (place & Steps::kWindow) {
            const auto& seen = shared.row_windows[row0 + 8 * i];
            visible[0] = column_mask.row(p.axis, quad(seen[0]), quad(seen[1]), at, lane4) >> (place >> 3) / 4;
          } else {
            visible[0] = KeyColumnMask::first(p.additional_kv - at.w, lane4);
          }
        }
        CUTE_UNROLL
        for (int i = 0; i < 2 * kRowBlocks; ++i) {
          CUTE_UNROLL
          for (int e = 0; e < kColumns / 4; ++e) {
            if (!(visible[i] & 1u << e)) s[i / 2][e / 2][i % 2 * 2 + e % 2] = -INFINITY;
          }
        }
      }
      softmax.update(s, o, subtracted);
      accumulate<Product, kRowBlocks, Traits::kHeadDim / 16, kColumns / Product::kStep>(
          o, [&](auto& a, int m, int step) __attribute__((always_inline)) { a = Product::operand(s[m], step); },
          [&](auto& b, int n, int step) __attribute__((always_inline)) { read_v(b, 16 * n, step, stage_bytes); });
    }
    if (kStages == 0 && step + 1 < steps) {
      __syncthreads();  // these values have been used
      load_step<Traits, true, false>(p, shared, step + 1, k, v);
    }
    if constexpr (Traits::kIsRing) shared.ring.release(step);
  }

  // Every warp writes its rows over those of the query, then whole rows to memory.
  wait_copies<0>();
  softmax.finish();
  __syncthreads();
  CUTE_UNROLL
  for (int i = 0; i < 2 * kRowBlocks; ++i) {
    const float normalisation = softmax.normalisation(i / 2, i % 2);
    CUTE_UNROLL
    for (int n = 0; n < Traits::kHeadDim / 8; ++n) {
      const int byte = (8 * n + 2 * lane4) * sizeof(Element);
      const float* pair = &o[i / 2][n][i % 2 * 2];
      Product::store_pair(q + Tile::offset(row0 + 8 * i, byte / 16) + byte % 16, pair[0] * normalisation,
                          pair[1] * normalisation);
    }
  }
  __syncwarp();
  const std::int64_t first_row = batch * p.queries * p.heads + head;
  {
    // A lane for each row that four of them share.
    const int token = lane4 < 2 * kRowBlocks ? shared.row_windows[row0 + 8 * lane4][0][3] : -1;
    const float2 logsumexp = softmax.logsumexp(lane4, subtracted);
    const std::int64_t at = first_row + static_cast<std::int64_t>(token) * p.heads;
    if (token >= 0) p.logsumexp[at] = logsumexp.x;
    if (token >= 0 && p.remainder != nullptr) p.remainder[at] = logsumexp.y;
  }
  const int out_bytes = p.head_dim_v * static_cast<int>(sizeof(Element));
  char* out = static_cast<char*>(p.out) + first_row * out_bytes;
#pragma unroll 4
  for (int i = threadIdx.x % 32; i < 16 * kRowBlocks * Tile::kChunks; i += 32) {
    const int row = warp_row + i / Tile::kChunks, chunk = i % Tile::kChunks;
    const int token = shared.row_windows[row][0][3];
    const uint4 data = load_chunk(q + Tile::offset(row, chunk));
    if (token < 0 || chunk * 16 >= out_bytes) continue;
    *reinterpret_cast<uint4*>(out + static_cast<std::int64_t>(token) * p.heads * out_bytes + chunk * 16) = data;
  }
}

}  // namespace natten_jax::sm80
