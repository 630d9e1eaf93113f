// Computation of a warp's query rows in the forward kernel: logits, mask, softmax and output.
#pragma once

#include "cuda/sm80/forward_traits.cuh"
#include "cuda/sm80/online_softmax.cuh"
#include "cuda/warp/mma.cuh"
#include "natten_jax/merge.h"

namespace natten_jax::sm80 {

/// The query rows that a warp computes: `kRowBlocks` blocks of 16 rows. A lane holds elements of two rows of every
/// block.
///
/// Queries, logits, output and softmax are arguments of the methods instead of members, because the compiler put
/// members into local memory.
template <class Traits>
struct WarpRows {
  using Element = typename Traits::Element;
  using Product = typename Traits::Product;
  using Tile = typename Traits::Tile;
  using Steps = KeySteps<Traits::kThreads>;
  static constexpr int kColumns = Traits::kColumns, kRowBlocks = Traits::kRowBlocks;
  static constexpr int kHeadSteps = Traits::kHeadDim / Product::kStep;
  using Logits = float[kRowBlocks][kColumns / 8][4];
  using Output = float[kRowBlocks][Traits::kHeadDim / 8][4];
  using Query = typename Product::A[Traits::kQueryInRegisters ? kRowBlocks : 1][kHeadSteps];
  using Softmax = OnlineSoftmax<kRowBlocks>;

  const ForwardParams& p;
  typename Traits::SharedStorage& shared;
  const int lane4, warp_row, row0;  // warp_row: first row of the warp; row0: first row of the lane
  const std::uint32_t q;
  typename Product::template ReadA<Tile> read_q;
  typename Product::template ReadB<Tile> read_k;
  const typename Product::template ReadTransposedB<Tile> read_v;

  CUTE_DEVICE WarpRows(const ForwardParams& p, typename Traits::SharedStorage& shared, std::uint32_t k, std::uint32_t v)
      : p(p),
        shared(shared),
        lane4(threadIdx.x % 4),
        warp_row(threadIdx.x / 32 * 16 * kRowBlocks),
        row0(warp_row + threadIdx.x % 32 / 4),
        q(shared_address(shared.q)),
        read_q(q, warp_row),
        read_k(k, 0),
        read_v(v, 0) {
    // Keeps these addresses in registers. Otherwise, the compiler recomputes them in every step, after the barrier at
    // the beginning of the step, and all warps wait for them. Keeping them makes the kernel 4% faster for heads of 128
    // in 3-D with stride 16 x 8 x 8. With a ring (which has no barrier per step) and for float32, other uses of these
    // registers save more time. In forms where registers are not few, the compiler's choice is better: with heads of
    // 256, keeping the addresses makes the kernel 1% slower.
    if constexpr (!Traits::kIsRing && Traits::kFewRegisters && sizeof(Element) == 2) {
      read_q.lane.base = keep_in_register(read_q.lane.base);
      read_k.lane.base = keep_in_register(read_k.lane.base);
    }
  }

  /// Loads the queries into registers.
  CUTE_DEVICE void load_query(Query& query) const {
    CUTE_UNROLL
    for (int m = 0; m < kRowBlocks; ++m) {
      CUTE_UNROLL
      for (int step = 0; step < kHeadSteps; ++step) read_q(query[m][step], 16 * m, step);
    }
  }

  /// Visibility of a step's keys to the warp's rows. `any`: false only if all logits are masked. `whole`: true only if
  /// no logit is masked.
  struct Visibility {
    bool any, whole;
  };
  CUTE_DEVICE Visibility visibility(int step) const {
    const int packed_column = shared.steps.packed_columns[step % Steps::kCapacity];
    Visibility result{true, (packed_column & Steps::kWhole) != 0};
    if ((packed_column & (Steps::kWhole | Steps::kWindow)) == Steps::kWindow) {
      const int4 at = shared.steps.tiles[step % Steps::kCapacity];
      const auto& box = shared.warp_boxes[threadIdx.x / 32];
      result.any = box.overlaps(p, at);
      result.whole = (packed_column >> 3) + kColumns <= p.kv_tile_tokens && box.contains(p, at);
    }
    return result;
  }

  /// Adds the products of the queries and a step's keys to `s`. `stage_bytes` is the offset of the step's stage.
  CUTE_DEVICE void multiply_by_keys(Logits& s, const Query& query, std::uint32_t stage_bytes) const {
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

  /// Replaces masked logits by -infinity. A logit is masked if the row does not attend to the key.
  CUTE_DEVICE void mask(Logits& s, int step) const {
    const int packed_column = shared.steps.packed_columns[step % Steps::kCapacity];
    const int4 at = shared.steps.tiles[step % Steps::kCapacity];
    const LaneMask<KeyColumnMask> lane_mask(KeyColumnMask(shared.mask_words, p.axis), lane4);
    // Initialised, because it would otherwise occupy registers between steps.
    std::uint32_t visible[2][kRowBlocks] = {};
    // Not unrolled: the compiler would predicate unrolled instructions instead of jumping over them, so they would take
    // issue slots even in steps without a mask.
#pragma unroll 1
    for (int half = 1; half >= 0; --half) {
      CUTE_UNROLL
      for (int i = 0; i < kRowBlocks; ++i) {
        visible[1][i] = visible[0][i];
        if (packed_column & Steps::kWindow) {
          const auto& window = shared.row_windows[row0 + 8 * (half * kRowBlocks + i)];
          visible[0][i] = lane_mask.row(p.axis, quad(window[0]), quad(window[1]), at) >> (packed_column >> 3) / 4;
        } else {
          visible[0][i] = KeyColumnMask::first(p.additional_kv - at.w, lane4);
        }
      }
    }
    CUTE_UNROLL
    for (int i = 0; i < 2 * kRowBlocks; ++i) {
      CUTE_UNROLL
      for (int e = 0; e < kColumns / 4; ++e) {
        if (!(visible[i / kRowBlocks][i % kRowBlocks] & 1u << e)) s[i / 2][e / 2][i % 2 * 2 + e % 2] = -INFINITY;
      }
    }
  }

  /// Updates the softmax with a step's logits, and adds the step's values to the output, weighted by the softmax.
  CUTE_DEVICE void add_values(Output& o, Softmax& softmax, Logits& s, std::uint32_t stage_bytes) const {
    softmax.update(s, o, [&](int i) -> float& { return shared.subtracted[row0 + 8 * i]; });
    accumulate<Product, kRowBlocks, Traits::kHeadDim / 16, kColumns / Product::kStep>(
        o, [&](auto& a, int m, int step) __attribute__((always_inline)) { a = Product::operand(s[m], step); },
        [&](auto& b, int n, int step) __attribute__((always_inline)) { read_v(b, 16 * n, step, stage_bytes); });
  }

  /// Writes the output and the logsumexps to global memory. The output first overwrites the queries in shared memory,
  /// so that the warp can then copy whole rows.
  ///
  /// `first_row` is the index of the row of token 0 among [batch, tokens, heads]. If `kMayHaveSink`, `sink` is the
  /// logit of the head's sink; -infinity without a sink.
  template <bool kMayHaveSink>
  CUTE_DEVICE void write(const Output& o, const Softmax& softmax, std::int64_t first_row, float sink) const {
    // Four lanes share several rows. Each of these lanes computes the logsumexp of one row: row number `lane4`.
    Logsumexp logsumexp = softmax.logsumexp(lane4, [&](int i) -> float& { return shared.subtracted[row0 + 8 * i]; });
    const float share_of_keys = kMayHaveSink && sink != -INFINITY ? add_sink(logsumexp, sink) : 1.f;
    CUTE_UNROLL
    for (int i = 0; i < 2 * kRowBlocks; ++i) {
      float factor = normalisation(softmax.row_sum[i / 2][i % 2]);
      if constexpr (kMayHaveSink) factor *= __shfl_sync(0xffffffffu, share_of_keys, i, 4);
      CUTE_UNROLL
      for (int n = 0; n < Traits::kHeadDim / 8; ++n) {
        const int byte = (8 * n + 2 * lane4) * sizeof(Element);
        const float* pair = &o[i / 2][n][i % 2 * 2];
        Product::store_pair(q + Tile::offset(row0 + 8 * i, byte / 16) + byte % 16, pair[0] * factor, pair[1] * factor);
      }
    }
    __syncwarp();
    {
      const int token = lane4 < 2 * kRowBlocks ? shared.row_windows[row0 + 8 * lane4][0][3] : -1;
      const std::int64_t at = first_row + static_cast<std::int64_t>(token) * p.heads;
      if (token >= 0) p.logsumexp[at] = logsumexp.value;
      if (token >= 0 && p.remainder != nullptr) p.remainder[at] = pack_remainder(logsumexp.remainder);
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
};

}  // namespace natten_jax::sm80
