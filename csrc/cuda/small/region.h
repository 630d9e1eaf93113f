// Mapping of a CTA to its rows, and layout of the columns that it keeps in shared memory.
//
// A warp owns a tile of 16 rows: queries, or keys in the kernel that computes key and value gradients. A CTA owns a
// region of tiles, and holds the box of columns that the region's rows see. A tile's columns are split into groups of
// 8; consecutive groups along one dimension form a line.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "cuda/small/forms.h"
#include "natten_jax/problem.h"
#include "natten_jax/status.h"

namespace natten_jax::small {

/// Device properties.
struct Device {
  int shared_memory;  ///< Maximum bytes per CTA.
  int shared_memory_multiprocessor;
  int shared_memory_reserved;  ///< Reserved by the system for every CTA.
  int multiprocessors;
  bool has_boxes;  ///< Supports TMA box copies, and the build has kernels that use them.
};

/// Byte offsets in a CTA's shared memory. The fields of plain passes come first, as in Region.
struct SharedLayout {
  int offsets;     ///< uint32 per warp and pair of groups: the pair's offset in a stage.
  int masks;       ///< A byte per warp, pair and lane; the bytes of two pairs that are computed together are adjacent.
  int row_places;  ///< int per row.
  int box_state;   ///< BoxState; boxes only.
  int stages;
  int stage_bytes;
  int second;         ///< Boxes only: offset in a stage of the second array's columns; also the distance between
                      ///< arrays.
  int box_end;        ///< Boxes only: end of the first array's columns in a stage.
  int boxes_end;      ///< Boxes only: end of the columns of all arrays in a stage.
  int rows;           ///< In a stage, or per CTA with boxes: the rows of each warp, for each array of rows.
  int statistics;     ///< In a stage: kStatisticsBytes per column.
  int additional;     ///< In a stage: additional columns.
  int places;         ///< int2 per column of the box: its token, and its offset in a stage.
  int batch_entries;  ///< EntryState, if batch entries may have separate layouts.
  int entries;   ///< uint32 per warp and pair of groups. With a relative bias: byte distances from the first pair's
                 ///< table entries and sums to this pair's entries and sums; with key biases: distance from the first
                 ///< pair's tokens to this pair's tokens.
  int table;     ///< In a stage: a head's relative bias, with `Region::table_margin` numbers of padding on both sides.
  int key_bias;  ///< Key biases: for each warp and pair of groups, a float per column.
  int sums;      ///< For each warp, one row per query of 16-bit logit gradients, indexed by offset.
  int region_sums;  ///< Kernel of whole layouts: sums over the queries of each warp (RegionSums).
  int bytes;        ///< Total size.
};

/// Shape of a CTA's region. Dimensions are numbered by role: 0 and 1 are the dimensions of a group, 1 is the dimension
/// of a line.
///
/// Fields of plain forward passes come first: the first warps on an SM wait for each 64 bytes of parameters that
/// they touch, and such passes may take only 7 microseconds.
struct Region {
  int tile[kRank];   ///< Rows of a tile.
  int tiles[kRank];  ///< Tiles of a region.
  int group[kRank];  ///< Columns of a group, powers of two; 1 in dimension 2.
  int pitch[kRank];  ///< Distance between neighboring columns, in rows of shared memory.
  int warps;
  int stages;
  int items_of_cta;  ///< Batch entries and query heads that a CTA loops over.
  SharedLayout shared;
  int table;             ///< Capacity of a warp's tables, in pairs of groups. If this field comes earlier, the kernels
                         ///< with key biases spill registers.
  int extent[kRank];     ///< Tokens of the box in shared memory.
  int dimension[kRank];  ///< The problem's dimension for each region dimension.
  int next_statistic;    ///< Distance in bytes between the statistics of two consecutive columns of a group,
  int next_group;        ///< and between the statistics of the two groups of a pair.
  // Relative bias, in entries of a head's table; all zeros without one.
  int table_pitch[kRank];  ///< Distance in entries between consecutive offsets.
  int table_entries;
  int gradients;     ///< Entries of the table's gradient: fewer than table_entries, because its lines are not padded.
  int table_margin;  ///< Padding entries on each side of the table, which columns of a group that no row sees may
                     ///< index.
  int record;        ///< Numbers in a tile's record.
  // Distance in bytes between the entries of two consecutive columns of a group, and between the entries of the two
  // groups of a pair: [0] if rows are queries, [1] if rows are keys, which is negative. Kernels add these to addresses
  // directly.
  int next_entry[2];
  int next_entry_of_group[2];
  int next_sum_of_group;  ///< Distance in bytes between the sums of the two groups of a pair.
  int sum_pitch[kRank];   ///< Like table_pitch, but in a record.
  bool has_boxes;         ///< Columns are loaded by TMA as boxes; otherwise all threads copy chunks.
  int box;                ///< Maximum number of columns that a region sees.
  int regions[kRank];     ///< Regions per dilation group.
  int ctas;               ///< CTAs per SM that shared memory allows.
  std::int64_t count;     ///< Total number of regions, saturated at 2^31.
  double pairs;           ///< Pairs of groups that take compute time in a tile, including additional ones.
  double nanoseconds;     ///< Estimated time of the launch.
};

/// Position of a launch's queries and keys in the layout.
enum class Places {
  kComplete,   ///< The arrays cover the complete layout.
  kParts,      ///< The arrays are parts of a layout, at any position in it.
  kOfEntries,  ///< Every batch entry has a separate layout inside the arrays.
};

/// Returns the problem without additional tokens, for the key/value gradient kernel: another kernel computes the
/// gradients of additional tokens.
Problem without_additional(Problem problem);

/// Calls `call` with every region that a kernel supports for these tiles.
///
/// Returns:
///   An error if tiles do not have the size that the kernels require.
Status for_each_region(const Problem& problem, const std::int64_t (&rows)[kRank], const std::int64_t (&columns)[kRank],
                       Kernel kernel, Places places, const Device& device,
                       const std::function<void(const Region&)>& call);

/// Chooses the region with the shortest estimated launch time.
///
/// Args:
///   problem: the problem to solve.
///   rows, columns: shapes of a warp's tile and of a group, with kRows and kColumns tokens.
///   kernel: the kernel to launch.
///   places: position of the tokens in the layout.
///   device: device properties.
///   region: the result.
///
/// Returns:
///   An error if tiles or groups have another number of tokens, or if no region fits: the box of one tile (for the
///   kernel of whole layouts, of all tiles) is too large for shared memory.
Status choose_region(const Problem& problem, const std::int64_t (&rows)[kRank], const std::int64_t (&columns)[kRank],
                     Kernel kernel, Places places, const Device& device, Region& region);

/// A kernel of a pass, and its region.
struct Launch {
  Kernel kernel;
  Region region;
};

/// The tiled launches of a pass, except the gradients of additional tokens, and the estimated time of the whole pass.
struct PassEstimate {
  std::vector<Launch> launches;
  double seconds;
};

/// Estimates the time of a pass. In the backward pass, every kernel takes the key/value tile shape for its rows,
/// including the kernel that owns queries, because windows of queries and of keys have similar shapes.
///
/// Returns:
///   An error if the kernels do not support these tiles.
Status estimate_pass(const Problem& problem, const TileShapes& tiles, bool is_backward, const Device& device,
                     PassEstimate& estimate);

/// Returns the compiled head width for the problem; 0 if its heads are too wide.
int compiled_head_dim(const Problem& problem);

}  // namespace natten_jax::small
