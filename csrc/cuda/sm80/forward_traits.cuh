// Forms (compiled variants) of the forward kernel. A form defines tile sizes, the buffering of keys and values, and the
// contents of shared memory.
#pragma once

#include "cuda/common/column_mask.cuh"
#include "cuda/sm80/copy_ring.cuh"
#include "cuda/sm80/gather.cuh"
#include "cuda/sm80/key_steps.cuh"
#include "cuda/sm80/tile_plan.cuh"

namespace natten_jax::sm80 {

constexpr int kMostColumns = 128;  // maximum tokens of a key/value tile

template <class Element_, class Product_, int kHeadDim_, int kColumns_, int kStages_, int kWarps_ = 4>
struct ForwardTraits {
  using Element = Element_;
  using Product = Product_;
  static constexpr int kHeadDim = kHeadDim_;  // at least head_dim and head_dim_v
  static constexpr int kColumns = kColumns_;  // keys of a step
  static constexpr int kWarps = kWarps_;
  static constexpr int kThreads = 32 * kWarps;
  using Tile = SharedTile<kHeadDim * sizeof(Element)>;
  static constexpr int kRowBlocks = Tile::kRowBytes <= 256 ? 2 : 1;  // blocks of 16 rows that a warp computes
  // Number of steps whose keys and values fit into shared memory at a time; 0: keys and values share one buffer.
  static constexpr int kStages = kStages_;
  static constexpr bool kIsRing = kStages > 2;
  static constexpr int kAhead = kIsRing ? kStages / 2 : 1;  // number of steps that are loaded ahead
  static constexpr int kRows = 16 * kRowBlocks * kWarps;
  static constexpr bool kQueryInRegisters = Tile::kRowBytes <= 128;
  static constexpr bool kFewRegisters = kRowBlocks == 2;  // true if logits and output leave few registers
  static constexpr bool kHasKeyBias = false;              // true in KeyBiased

  static constexpr std::uint32_t kStageBytes = kColumns * Tile::kRowBytes;  // bytes of the keys or values of a step

  using KeyCopy = Gather<Tile, kColumns, kThreads>;

  struct SharedStorage {
    alignas(128) char q[kRows * Tile::kRowBytes];
    alignas(128) char keys_and_values[kStages == 0 ? 1 : 2 * kStages][kStageBytes];
    TilePlan plan;
    CopyRing<kIsRing ? kStages : 1, kThreads> ring;  // used if kIsRing; its buffers are the stages
    // Per row: [0] first key of its window (x, y, z), and the row's token or -1 without a query; [1] end of the window.
    alignas(16) int row_windows[kRows][2][4];
    TileRows<KeyCopy> columns;  // positions of the keys in a key/value tile
    KeySteps<kThreads> steps;
    VisibleBox warp_boxes[kWarps];
    float subtracted[kRows];  // logit that is subtracted from a row's logits, if these are large (OnlineSoftmax)
    std::uint32_t mask_words[KeyColumnMask::capacity(kMostColumns)];
  };
};

}  // namespace natten_jax::sm80
