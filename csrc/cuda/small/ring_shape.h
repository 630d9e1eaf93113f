// How passes go over a layout with a ring of what tiles see: which strips CTAs own, and what of it they hold.
//
// A warp owns a tile of 16 tokens, its rows: queries, or keys where their gradients are computed. A CTA owns a strip of
// such tiles side by side, which goes along one dimension of the layout. What these see, two arrays of columns, comes
// in slabs across that dimension, each of them once for a strip.
#pragma once

#include <cstdint>

#include "cuda/small/forms.h"
#include "cuda/small/region.h"
#include "natten_jax/problem.h"

namespace natten_jax::small {

/// How slabs come: the copy engine loads boxes, which takes compute capability 9.0, or warps copy chunks.
enum class RingLoads { kBoxes, kChunks };

/// The most warps of a CTA that multiply, as far as there are registers, beside those that load for them. Those that
/// have boxes loaded leave their registers to others; those that copy chunks have as many as any other.
constexpr int most_ring_warps(RingLoads loads, int head_dim) {
  if (loads == RingLoads::kChunks) return head_dim == 64 ? 10 : 14;
  return head_dim == 64 ? 12 : 16;
}
constexpr int ring_loaders(RingLoads loads) {
  return loads == RingLoads::kBoxes ? 4 : 2;
}
constexpr int ring_threads(RingLoads loads, int head_dim) {
  return 32 * (most_ring_warps(loads, head_dim) + ring_loaders(loads));
}

/// Arrays of a warp's tile that come by way of shared memory: keys and values do not, so that more slabs fit there.
constexpr int ring_tile_arrays(Kernel kernel) {
  return kernel == Kernel::kForward ? 1 : kernel == Kernel::kQueryGradient ? 3 : 0;
}

/// Columns of a block: what a product sums over at a time.
inline constexpr int kBlockKeys = 2 * kColumns;

/// The longest strip: what its rows see is tabulated in shared memory.
inline constexpr int kLongestStrip = 1024;

/// The most slabs of a ring, and what its barriers take of shared memory (RingBarriers).
inline constexpr int kMostRingSlots = 24, kRingBarrierBytes = 640;

/// The most keys of a slab whose biases come with it: each lane that loads has two of them.
inline constexpr int kMostBiasedKeys = 256;

/// The most steps of a segment: a bit each says which are computed once more. With 64 instead of 32, strips of 64 took
/// 0.95 times as long; where boxes are loaded, there is no register for that.
constexpr int most_segment_steps(RingLoads loads) {
  return loads == RingLoads::kBoxes ? 32 : 64;
}

/// What a warp that owns queries sees of a slab: so many groups, and blocks of each.
struct RingForm {
  int groups, inner;
  constexpr int blocks() const { return groups * inner; }
};
/// Those that kernels are compiled for.
inline constexpr RingForm kRingForms[] = {{4, 1}, {2, 2}};

/// A launch. Dimensions are numbered by what they are for: across strips, along blocks inside of a slab, and the one
/// that strips go along.
struct RingShape {
  RingLoads loads;
  int dimension[kRank];  ///< Which of the problem's each is.
  int rows[kRank];       ///< Rows of a warp's tile, powers of two.
  int warps;             ///< Warps of a CTA that multiply; none where the form does not take a problem.
  int beside[2];         ///< Warps side by side across the strip; others take the next steps along it.
  int form;              ///< Which of kRingForms, where rows are queries.
  int blocks;            ///< The most that a warp sees of a slab.
  // A slab is [groups, thick, inner, wide] columns. It begins at multiples of its blocks' extents, counted from
  // `phase`.
  int wide, thick, inner;
  int thick_shift;  ///< Logarithm of `thick`.
  int groups;
  int group_blocks;
  int phase[kRank];
  int slots;  ///< Slabs of the ring.
  int strips[2];
  int steps;                    ///< Steps of a strip, a tile each.
  int segments, segment_steps;  ///< Parts of a strip that CTAs take,
  int turn;                     ///< and by how many places they are further on in each round.
  // Bytes of shared memory.
  int array_bytes;  ///< A slab of one array.
  int tile_bytes;   ///< A tile of one array.
  int tiles, windows, statistics, masks, barriers, bytes;
  int bias_line;       ///< Entries of a line of a relative bias, of which the tables come last (ring_bias.h); or none.
  double nanoseconds;  ///< That the launch is estimated to take.
  // For a batch entry and head: products of a row and a column, and columns that are loaded.
  std::int64_t pairs, keys;

  constexpr int turns() const { return warps / (beside[0] * beside[1]); }
};

/// Whether the form takes such problems at all, whatever the shape: heads of 32 and 64, windows of many keys in
/// two dimensions or three, and complete layouts without dilation, additional tokens or a dimension
/// that wraps. Cheap: asked before all else.
bool can_have_ring(const Problem& problem, Places places);

/// Whether regions of such problems have been timed beside rings, and have estimates of their own.
bool is_timed_beside_rings(const Problem& problem, Places places);

/// Whether the kernel of key and value gradients takes them: where query heads have key/value heads of their own.
bool can_have_gradient_ring(const Problem& problem, Places places);

/// Finds the fastest launch of a kernel that owns queries, for tiles of kRows queries and groups of kColumns keys, and
/// for how slabs come on a device; none where the form takes no such problem, or the kernel is not compiled with what
/// is added to its logits. Of a relative bias, that of query gradients is not.
RingShape choose_ring(const Problem& problem, const std::int64_t (&rows)[kRank], const std::int64_t (&columns)[kRank],
                      Kernel kernel, Places places, RingLoads loads, const Device& device);

/// Likewise for the kernel of key and value gradients, of all tiles: these are chosen here. With a relative bias, slabs
/// come as boxes.
RingShape choose_gradient_ring(const Problem& problem, Places places, RingLoads loads, const Device& device);

/// Chooses how far CTAs turn from round to round, so that those whose strips see most are not waited for.
void balance_ring(const Problem& problem, Kernel kernel, const Device& device, RingShape& shape);

/// What a launch is estimated to take with a region, where rings are estimated, too.
double nanoseconds_beside_rings(const Region& region, const Problem& problem, Kernel kernel, Places places);

/// The first, none where it is not estimated to be faster than a launch with a region.
RingShape choose_ring_before(const Region& region, const Problem& problem, const std::int64_t (&rows)[kRank],
                             const std::int64_t (&columns)[kRank], Kernel kernel, Places places, RingLoads loads,
                             const Device& device);

}  // namespace natten_jax::small
