// Mapping of a CTA to its rows, and layout of the columns that it keeps in shared memory.
//
// A warp owns a tile of 16 rows: queries, or keys in the kernel that computes key and value gradients. The columns of
// these rows are the keys that the queries see, or the queries that see the keys; in both cases, comments use the words
// "a row sees a column". A CTA owns a region of tiles, and keeps in shared memory the box of columns that the region's
// rows see. A tile's columns are split into groups of 8. Consecutive groups along one dimension form a line.
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
  int shared_memory;  ///< Maximum bytes of shared memory per CTA.
  int shared_memory_multiprocessor;
  int shared_memory_reserved;  ///< Bytes that the system reserves for every CTA.
  int multiprocessors;
  bool has_boxes;  ///< The device supports TMA box copies, and the build has kernels that use them.
};

/// Byte offsets in a CTA's shared memory. As in Region, the fields that passes of plain problems read come first.
struct SharedLayout {
  int offsets;      ///< uint32 per warp and pair of groups: the pair's offset in a stage.
  int masks;        ///< A byte per warp, pair and lane; the bytes of two pairs that are computed together are adjacent.
  int row_indices;  ///< int per row: Tables::row_indices.
  int box_state;    ///< BoxState; boxes only.
  int stages;
  int stage_bytes;
  int second;          ///< Boxes only: distance in a stage between the columns of consecutive arrays.
  int box_end;         ///< Boxes only: end of the first array's columns in a stage.
  int boxes_end;       ///< Boxes only: end of the columns of all arrays in a stage.
  int rows;            ///< Each warp's rows, for each array of rows: once per CTA with boxes, otherwise in each stage.
  int statistics;      ///< In a stage: kStatisticsBytes per column.
  int additional;      ///< In a stage: the columns of additional tokens.
  int column_offsets;  ///< int2 per column of the box: its token, and its offset in a stage.
  int batch_entries;   ///< EntryState, if batch entries may have separate layouts.
  int entries;   ///< uint32 per warp and pair of groups. With a relative bias: distances in bytes from the first pair's
                 ///< table entries to this pair's entries, and from the first pair's sums to this pair's sums. With
                 ///< key biases: distance in tokens from the first pair's keys to this pair's keys.
  int table;     ///< In a stage: a head's relative bias, with `Region::table_margin` numbers of padding on both sides.
  int key_bias;  ///< Key biases: for each warp and pair of groups, a float per column.
  int sums;      ///< For each warp, 16-bit logit gradients: a row per query, and a column per offset (bias_sums.cuh).
  int region_sums;  ///< Kernel of whole layouts: for each warp, sums of logit gradients over its queries (RegionSums).
  int bytes;        ///< Total size.
};

/// Shape of a CTA's region. Dimensions are numbered by role: a group extends along dimensions 0 and 1, and a line along
/// dimension 1.
///
/// The fields that plain forward passes read come first. These passes may take only 7 microseconds, and the first warps
/// on an SM wait for every 64 bytes of parameters that they read.
struct Region {
  int tile[kRank];   ///< Extents of a tile, in rows.
  int tiles[kRank];  ///< Extents of a region, in tiles.
  int group[kRank];  ///< Extents of a group, in columns: powers of two; 1 in dimension 2.
  int pitch[kRank];  ///< Distance between neighboring columns, in rows of shared memory.
  int warps;
  int stages;
  int items_of_cta;  ///< Items (pairs of a batch entry and a query head) that a CTA loops over.
  SharedLayout shared;
  int table_capacity;    ///< Capacity of a warp's tables, in pairs of groups. If this field comes earlier, the kernels
                         ///< with key biases spill registers.
  int extent[kRank];     ///< Extents of the box in shared memory, in tokens.
  int dimension[kRank];  ///< The problem's dimension for each region dimension.
  int next_statistic;    ///< Distance in bytes between the statistics of two consecutive columns of a group.
  int next_group;        ///< Distance in bytes between the statistics of the two groups of a pair.
  // Layout of the table with a head's relative bias; all zeros without a relative bias.
  int table_pitch[kRank];  ///< Distance in entries between consecutive offsets.
  int table_entries;
  int gradients;  ///< Entries of the table's gradient: fewer than table_entries, because the gradient's lines are not
                  ///< padded.
  int table_margin;  ///< Padding entries before and after the table, which kernels may read for columns of a group that
                     ///< no row sees.
  int record;        ///< Numbers in a tile's record (RecordLayout).
  // Distances in bytes, which kernels add to addresses: between the entries of two consecutive columns of a group
  // (`next_entry`), and between the entries of the two groups of a pair (`next_entry_of_group`). Element 0 is used if
  // rows are queries. Element 1 is used if rows are keys, and is negative.
  int next_entry[2];
  int next_entry_of_group[2];
  int next_sum_of_group;  ///< Distance in bytes between the sums of the two groups of a pair.
  int sum_pitch[kRank];   ///< Distance in numbers between consecutive offsets in a record.
  bool has_boxes;         ///< True if TMA loads columns as boxes; false if all threads copy chunks.
  int box;                ///< Number of columns in the box: the product of `extent`.
  int regions[kRank];     ///< Regions per dilation group.
  int ctas;               ///< CTAs per SM that shared memory and registers allow.
  std::int64_t count;     ///< Total number of regions; not exact if it is 2^31 or more.
  double pairs;           ///< Pairs of groups per tile that the cost model assumes, including additional pairs.
  double nanoseconds;     ///< Estimated time of the launch.
};

/// Part of the layout that a launch's arrays cover.
enum class Coverage {
  kComplete,  ///< The arrays cover the complete layout.
  kParts,     ///< The arrays are parts of a layout, at any position in it.
  kPerEntry,  ///< Every batch entry has a separate layout inside the arrays.
};

/// Returns the problem without additional tokens. The key/value gradient kernel gets this problem, because another
/// kernel computes the gradients of additional tokens.
Problem without_additional(Problem problem);

/// Calls `call` with every region that a kernel supports for these tiles.
///
/// Returns:
///   An error if the kernel does not support the problem, or if tiles have other sizes than the kernel requires.
Status for_each_region(const Problem& problem, const std::int64_t (&rows)[kRank], const std::int64_t (&columns)[kRank],
                       Kernel kernel, Coverage coverage, const Device& device,
                       const std::function<void(const Region&)>& call);

/// Chooses the region with the shortest estimated launch time.
///
/// Args:
///   problem: the problem to solve.
///   rows, columns: shapes of a warp's tile and of a group, with kRows and kColumns tokens.
///   kernel: the kernel to launch.
///   coverage: part of the layout that the arrays cover.
///   device: device properties.
///   region: the result.
///
/// Returns:
///   An error if the kernel does not support the problem, if tiles or groups have other numbers of tokens, or if no
///   region fits into shared memory. A region does not fit if the box of a single tile (in the kernel of whole
///   layouts, of all tiles) is too large.
Status choose_region(const Problem& problem, const std::int64_t (&rows)[kRank], const std::int64_t (&columns)[kRank],
                     Kernel kernel, Coverage coverage, const Device& device, Region& region);

/// A kernel of a pass, and its region.
struct Launch {
  Kernel kernel;
  Region region;
};

/// The tiled launches of a pass, and the estimated time of the whole pass. `launches` does not include the gradients of
/// additional tokens, but `seconds` does.
struct PassEstimate {
  std::vector<Launch> launches;
  double seconds;
};

/// Estimates the time of a pass. In the backward pass, every kernel uses the key/value tile shape for its rows. The
/// kernel that owns queries also uses it, because windows of queries and of keys have similar shapes.
///
/// Returns:
///   An error if the kernels do not support these tiles.
Status estimate_pass(const Problem& problem, const TileShapes& tiles, bool is_backward, const Device& device,
                     PassEstimate& estimate);

/// Returns the compiled head width for the problem; 0 if its heads are too wide.
int compiled_head_dim(const Problem& problem);

}  // namespace natten_jax::small
