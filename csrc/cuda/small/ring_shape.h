// Shape of launches with a ring. The kernels keep the columns of their tiles in a ring buffer in shared memory.
//
// - Tile: 16 tokens, the rows of a warp. Rows are queries or, in the kernel of key and value gradients, keys. Columns
//   are the keys that queries see, or the queries that see keys. As in region.h, comments use the words "a row sees a
//   column" for both.
// - Strip: a part of the layout that is as wide as a few adjacent tiles and, in one dimension, extends from one end of
//   the layout to the other. CTAs move along strips in this dimension.
// - Step: the adjacent tiles at one position along a strip. Each tile of a step is computed by a different warp.
// - Unit: the work of a CTA in a round. It is a segment of a strip (some consecutive steps) for one batch entry and
//   head.
// - Slab: the columns of two arrays that the tiles of a strip see at one or a few positions along the strip. A slab
//   consists of groups, and a group consists of blocks of 16 columns. The ring holds several consecutive slabs. Loader
//   warps load each slab once per unit.
#pragma once

#include <cstdint>

#include "cuda/small/forms.h"
#include "cuda/small/region.h"
#include "natten_jax/problem.h"

namespace natten_jax::small {

/// Method of loading slabs. TMA loads boxes, which requires compute capability 9.0, or warps copy chunks of 16 bytes.
enum class RingLoads { kBoxes, kChunks };

/// Returns the maximum number of compute warps per CTA for which there are enough registers, in addition to the loader
/// warps. TMA loader warps give registers to the compute warps. Loader warps that copy chunks do not.
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

/// Returns the number of arrays whose tiles are loaded through shared memory. If rows are keys, warps load tiles from
/// global memory into registers, to leave room for more slabs in shared memory.
constexpr int ring_tile_arrays(Kernel kernel) {
  return kernel == Kernel::kForward ? 1 : kernel == Kernel::kQueryGradient ? 3 : 0;
}

/// Number of columns of a block, equal to the depth (K) of an MMA instruction.
inline constexpr int kBlockKeys = 2 * kColumns;

/// Maximum length of a strip in tokens. It is limited by a table in shared memory, which has the columns that each row
/// sees along the strip.
inline constexpr int kLongestStrip = 1024;

/// Maximum number of slabs in a ring, and bytes of shared memory of its barriers (RingBarriers).
inline constexpr int kMostRingSlots = 24, kRingBarrierBytes = 640;

/// Maximum number of keys of a slab with key biases, because every lane of the loader warps handles at most two keys.
inline constexpr int kMostBiasedKeys = 256;

/// Returns the maximum number of steps of a segment, which is the size of a bit mask that marks the steps to recompute.
/// With chunk loads, strips of 64 steps took 0.95 times as long with a maximum of 64 as with 32. With TMA loads, there
/// are not enough registers for a mask of 64 bits.
constexpr int most_segment_steps(RingLoads loads) {
  return loads == RingLoads::kBoxes ? 32 : 64;
}

/// Blocks of a slab that a warp of queries multiplies: `inner` blocks in each of `groups` groups.
struct RingForm {
  int groups, inner;
  constexpr int blocks() const { return groups * inner; }
};
/// Forms for which kernels are compiled.
inline constexpr RingForm kRingForms[] = {{4, 1}, {2, 2}};

/// Shape of a launch. Dimensions are numbered by role. Dimension 2 is the direction of strips, and dimensions 0 and 1
/// are the other two. Blocks always extend in dimension 0. Coordinates in dimensions 0, 1 and 2 are named `across`,
/// `inside` and `along`.
struct RingShape {
  RingLoads loads;
  int dimension[kRank];  ///< The problem's dimension for each dimension of the shape.
  int rows[kRank];       ///< Extents of a warp's tile in tokens, powers of two.
  int warps;             ///< Number of compute warps of a CTA; 0 if rings do not support the problem.
  int adjacent[2];       ///< Number of adjacent warps in dimensions 0 and 1. They compute the tiles of one step.
  int form;              ///< Index into kRingForms, if rows are queries.
  int blocks;            ///< Maximum number of blocks of a slab that a warp sees.
  // A slab has [groups, thick, inner, wide] columns in dimensions 0, 2, 1 and 0 of the shape. In each dimension, its
  // first coordinate is `phase` plus a multiple of a block's extent.
  int wide, thick, inner;
  int thick_shift;  ///< Base-2 logarithm of `thick`.
  int groups;
  int group_blocks;
  int phase[kRank];
  int slots;                    ///< Maximum number of slabs in the ring.
  int strips[2];                ///< Number of strips in dimensions 0 and 1.
  int steps;                    ///< Number of steps of a strip.
  int segments, segment_steps;  ///< A strip is divided into `segments` segments of `segment_steps` steps each.
  int rotation;                 ///< Rotation of the map from CTAs to units, per round (unit_of_round).
  int array_bytes;              ///< Bytes of a slab in one array.
  int tile_bytes;               ///< Bytes of a tile in one array.
  // Byte offsets in shared memory, and its size.
  int tiles, windows, statistics, masks, barriers, bytes;
  int bias_line;       ///< Number of entries in a line of a relative bias's table (ring_bias.h). 0 without such a bias.
  double nanoseconds;  ///< Estimated time of the launch.
  // Numbers per batch entry and head: pairs of a row and a column that are multiplied, and columns that are loaded.
  std::int64_t pairs, keys;

  /// Returns the number of warp sets. A warp set consists of adjacent warps, which process one step. The warp sets of a
  /// CTA process different steps of a strip concurrently.
  constexpr int warp_sets() const { return warps / (adjacent[0] * adjacent[1]); }
};

/// True if rings support the features of a problem: heads of 32 and 64, windows of many keys in two or three
/// dimensions, and complete layouts without dilation, additional tokens or wrapped dimensions. Not every such problem
/// has a shape that can be launched. This check is cheap, and comes before the choice of a shape.
bool can_have_ring(const Problem& problem, Coverage coverage);

/// True if regions were timed against rings for problems like this one. The estimates of regions then use the costs
/// that were fitted to these times.
bool is_timed_against_rings(const Problem& problem, Coverage coverage);

/// True if the kernel of key and value gradients with a ring supports the features of a problem. It requires that each
/// query head has a separate key/value head.
bool can_have_gradient_ring(const Problem& problem, Coverage coverage);

/// Returns the shape of the fastest launch of a kernel that owns queries, for tiles of kRows queries, groups of
/// kColumns keys and a method of loading slabs. `warps` is 0 if rings do not support the problem, or if no kernel is
/// compiled for the problem's biases. The kernel of query gradients does not support a relative bias.
RingShape choose_ring(const Problem& problem, const std::int64_t (&rows)[kRank], const std::int64_t (&columns)[kRank],
                      Kernel kernel, Coverage coverage, RingLoads loads, const Device& device);

/// Returns the shape of the fastest launch of the kernel of key and value gradients. This function also chooses the
/// tiles. With biases, `warps` is 0 unless slabs are loaded as boxes.
RingShape choose_gradient_ring(const Problem& problem, Coverage coverage, RingLoads loads, const Device& device);

/// Chooses `rotation`, the rotation of the map from CTAs to units per round. The rotation gives all CTAs about equal
/// work, although some strips see more columns than others.
void balance_ring(const Problem& problem, Kernel kernel, const Device& device, RingShape& shape);

/// Returns the estimated time of a launch with a region, in nanoseconds, for comparison with the estimates of rings.
double nanoseconds_against_rings(const Region& region, const Problem& problem, Kernel kernel, Coverage coverage);

/// Like choose_ring, but `warps` is also 0 if the launch with a region is estimated to be faster.
RingShape choose_faster_ring(const Region& region, const Problem& problem, const std::int64_t (&rows)[kRank],
                             const std::int64_t (&columns)[kRank], Kernel kernel, Coverage coverage, RingLoads loads,
                             const Device& device);

}  // namespace natten_jax::small
