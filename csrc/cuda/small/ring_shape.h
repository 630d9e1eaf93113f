// Shape of launches that keep columns in a ring buffer in shared memory: the strips of a layout that CTAs own, and the
// columns that a CTA holds at a time.
//
// A warp owns a tile of 16 tokens, its rows: queries, or keys if their gradients are computed. A CTA owns a strip of
// adjacent tiles, and moves along one dimension of the layout. The columns that these tiles see, in two arrays, are
// loaded in slabs across that dimension, each slab once per strip.
#pragma once

#include <cstdint>

#include "cuda/small/forms.h"
#include "cuda/small/region.h"
#include "natten_jax/problem.h"

namespace natten_jax::small {

/// Method of loading slabs: as TMA boxes, which require compute capability 9.0, or in chunks that warps copy.
enum class RingLoads { kBoxes, kChunks };

/// Returns the maximum number of compute warps of a CTA that registers allow, without the loader warps. TMA loader
/// warps give registers to the compute warps; loader warps that copy chunks keep a full share.
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

/// Returns the number of arrays whose tiles are loaded through shared memory. If rows are keys, tiles are loaded
/// directly into registers, to leave room for more slabs.
constexpr int ring_tile_arrays(Kernel kernel) {
  return kernel == Kernel::kForward ? 1 : kernel == Kernel::kQueryGradient ? 3 : 0;
}

/// Columns of a block, the depth of one MMA instruction.
inline constexpr int kBlockKeys = 2 * kColumns;

/// The longest strip; shared memory holds a table of the columns that its rows see.
inline constexpr int kLongestStrip = 1024;

/// Maximum slabs of a ring, and the shared memory of its barriers (RingBarriers).
inline constexpr int kMostRingSlots = 24, kRingBarrierBytes = 640;

/// Maximum keys of a slab with key biases: every loader lane handles two of them.
inline constexpr int kMostBiasedKeys = 256;

/// Returns the maximum steps of a segment: a bit mask marks the steps to recompute. With 64 instead of 32, strips of 64
/// took 0.95 times as long; with TMA loads, registers do not allow it.
constexpr int most_segment_steps(RingLoads loads) {
  return loads == RingLoads::kBoxes ? 32 : 64;
}

/// Part of a slab that a warp of queries sees: `groups` groups of `inner` blocks.
struct RingForm {
  int groups, inner;
  constexpr int blocks() const { return groups * inner; }
};
/// Compiled forms.
inline constexpr RingForm kRingForms[] = {{4, 1}, {2, 2}};

/// Shape of a launch. Dimensions are numbered by role: across strips, along blocks inside of a slab, along the strip.
struct RingShape {
  RingLoads loads;
  int dimension[kRank];  ///< The problem's dimension for each dimension of the shape.
  int rows[kRank];       ///< Rows of a warp's tile, powers of two.
  int warps;             ///< Compute warps of a CTA; 0 if rings do not support the problem.
  int beside[2];         ///< Adjacent warps across the strip; the other warps take the next steps along it.
  int form;              ///< Index into kRingForms, if rows are queries.
  int blocks;            ///< Maximum blocks of a slab that a warp sees.
  // A slab is [groups, thick, inner, wide] columns. It begins at `phase` plus a multiple of its blocks' extents.
  int wide, thick, inner;
  int thick_shift;  ///< Base-2 logarithm of `thick`.
  int groups;
  int group_blocks;
  int phase[kRank];
  int slots;  ///< Slabs in the ring.
  int strips[2];
  int steps;                    ///< Steps of a strip, one tile each.
  int segments, segment_steps;  ///< Segments of a strip, the work units of CTAs,
  int turn;                     ///< and the rotation of the map from CTAs to segments per round.
  // Bytes of shared memory.
  int array_bytes;  ///< A slab of one array.
  int tile_bytes;   ///< A tile of one array.
  int tiles, windows, statistics, masks, barriers, bytes;
  int bias_line;       ///< Entries of a line of a relative bias, whose tables come last in shared memory (ring_bias.h);
                       ///< or 0.
  double nanoseconds;  ///< Estimated time of the launch.
  // Per batch entry and head: products of a row and a column, and loaded columns.
  std::int64_t pairs, keys;

  /// Returns the number of turns: groups of adjacent warps, which process different steps of a strip concurrently.
  constexpr int turns() const { return warps / (beside[0] * beside[1]); }
};

/// True if rings support a problem with some shape: heads of 32 and 64, windows of many keys in two or three
/// dimensions, and complete layouts without dilation, additional tokens or wrapped dimensions. Cheap, so it is checked
/// first.
bool can_have_ring(const Problem& problem, Places places);

/// True if launches with regions have been timed against rings for such problems, and have separate cost estimates.
bool is_timed_beside_rings(const Problem& problem, Places places);

/// True if the kernel of key and value gradients supports the problem: each query head needs a separate key/value head.
bool can_have_gradient_ring(const Problem& problem, Places places);

/// Returns the shape of the fastest launch of a kernel that owns queries, for tiles of kRows queries and groups of
/// kColumns keys, and for a device's way of loading slabs. `warps` is 0 if rings do not support the problem, or the
/// kernel is not compiled with the problem's biases. Query gradients do not support a relative bias.
RingShape choose_ring(const Problem& problem, const std::int64_t (&rows)[kRank], const std::int64_t (&columns)[kRank],
                      Kernel kernel, Places places, RingLoads loads, const Device& device);

/// Returns the shape of the fastest launch of the kernel of key and value gradients, including its tiles. With a
/// relative bias, slabs are loaded as boxes.
RingShape choose_gradient_ring(const Problem& problem, Places places, RingLoads loads, const Device& device);

/// Chooses the rotation of CTAs per round that balances their work, as some strips see more than others.
void balance_ring(const Problem& problem, Kernel kernel, const Device& device, RingShape& shape);

/// Returns the estimated nanoseconds of a launch with a region, to compare with estimates of rings.
double nanoseconds_beside_rings(const Region& region, const Problem& problem, Kernel kernel, Places places);

/// Like choose_ring, but `warps` is 0 unless the ring is estimated to be faster than the launch with a region.
RingShape choose_ring_before(const Region& region, const Problem& problem, const std::int64_t (&rows)[kRank],
                             const std::int64_t (&columns)[kRank], Kernel kernel, Places places, RingLoads loads,
                             const Device& device);

}  // namespace natten_jax::small
