// Which rows a CTA owns, which columns it keeps in shared memory for them, and where.
//
// A warp owns a tile of 16 rows: queries, or keys in the kernel of their gradients. A CTA owns a region of tiles, and
// holds the box of columns that the region's rows see. A tile's columns are groups of 8, and groups that follow each
// other in one dimension are a line.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "cuda/small/forms.h"
#include "natten_jax/problem.h"
#include "natten_jax/status.h"

namespace natten_jax::small {

/// What a device has.
struct Device {
  int shared_memory;  ///< Bytes that a CTA may have.
  int shared_memory_multiprocessor;
  int shared_memory_reserved;  ///< That each CTA takes besides its own.
  int multiprocessors;
  bool has_boxes;  ///< The engine that copies boxes of tokens, and kernels that use it.
};

/// Offsets in a CTA's shared memory, in bytes. What plain passes need comes first, as in Region.
struct SharedLayout {
  int offsets;     ///< uint32 for each warp and pair of groups: where it lies in a stage.
  int masks;       ///< A byte for each warp, pair and lane, those of two pairs that are computed at once side by side.
  int row_places;  ///< int for each row.
  int box_state;   ///< BoxState, for boxes.
  int stages;
  int stage_bytes;
  int second;         ///< In a stage, for boxes: the second array's columns, and how far others are apart.
  int box_end;        ///< In a stage, for boxes: where those of the first array end.
  int boxes_end;      ///< In a stage, for boxes: where those of all arrays end.
  int rows;           ///< In a stage, or for boxes in the CTA: the warps' rows of each array that they need.
  int statistics;     ///< In a stage: kStatisticsBytes for each column.
  int additional;     ///< In a stage: additional columns.
  int places;         ///< int2 for each column of the box: its token, and where it lies in a stage.
  int batch_entries;  ///< EntryState, where batch entries may have layouts of their own.
  int entries;  ///< Like `offsets` with a relative bias: how far its entries are behind the first ones, and their sums;
                ///< with biases of keys: how far its tokens are.
  int table;    ///< In a stage: a head's relative bias, between `Region::table_margin` numbers on both sides.
  int key_bias;     ///< For each warp and pair of groups, a float for each of its columns: biases of keys.
  int sums;         ///< For each warp, a row for each of its queries of 16-bit gradients of logits, by offset.
  int region_sums;  ///< For whole layouts, sums of the queries of each warp (RegionSums).
  int bytes;        ///< All of it.
};

/// Dimensions are numbered by what they are for: 0 and 1 are those of a group, 1 is that of a line.
///
/// What plain forward passes need comes first: the first warps of a multiprocessor wait for each 64 bytes of parameters
/// that they touch, and such passes may take 7 microseconds in all.
struct Region {
  int tile[kRank];   ///< Rows of a tile.
  int tiles[kRank];  ///< Tiles of a region.
  int group[kRank];  ///< Columns of a group, powers of two; that of dimension 2 is 1.
  int pitch[kRank];  ///< Rows of shared memory between neighboring columns.
  int warps;
  int stages;
  int items_of_cta;  ///< Batch entries and query heads that a CTA goes over.
  SharedLayout shared;
  int table;             ///< Pairs of groups that a warp's tables have room for. Further up, and biases of keys make
                         ///< kernels spill.
  int extent[kRank];     ///< Tokens of the box in shared memory.
  int dimension[kRank];  ///< Which of the problem's each is.
  int next_statistic;    ///< Bytes between statistics of two columns that follow each other in a group,
  int next_group;        ///< and between those of two groups of a pair.
  // A relative bias, in entries of a head's table; all zeros where there is none.
  int table_pitch[kRank];  ///< From one offset to the next.
  int table_entries;
  int gradients;     ///< Entries of the table's gradient: fewer, as lines are not filled up.
  int table_margin;  ///< How far outside of the table columns lie that a group has and no row sees.
  int record;        ///< Numbers of a tile's record.
  // Bytes between the entries of two columns that follow each other in a group, and between those of two groups of a
  // pair: where rows are queries, and where they are keys, which is negative. Kernels add these to addresses as they
  // are.
  int next_entry[2];
  int next_entry_of_group[2];
  int next_sum_of_group;  ///< Bytes between the sums of two groups of a pair.
  int sum_pitch[kRank];   ///< In a record, as table_pitch.
  bool has_boxes;         ///< Whether the copy engine loads a region's columns, or all threads do, in chunks.
  int box;                ///< Most columns that a region sees.
  int regions[kRank];     ///< Regions of a dilation group.
  int ctas;               ///< That a multiprocessor has the shared memory for.
  std::int64_t count;     ///< All regions; 2^31 are some number of that and more.
  double pairs;           ///< Pairs of groups that tiles take time for, additional ones among them.
  double nanoseconds;     ///< That the launch is estimated to take.
};

/// Where a launch's queries and keys lie.
enum class Places {
  kComplete,   ///< The arrays are the layout, all of it.
  kParts,      ///< They are parts of one, which may begin anywhere in it.
  kOfEntries,  ///< Each batch entry has a layout of its own in them.
};

/// A problem as the kernel of key and value gradients sees it: those of additional tokens are not its own.
Problem without_additional(Problem problem);

/// Calls `call` with every region that a kernel can take for tiles.
///
/// Returns:
///   An error where tiles are not of the size that the kernels take.
Status for_each_region(const Problem& problem, const std::int64_t (&rows)[kRank], const std::int64_t (&columns)[kRank],
                       Kernel kernel, Places places, const Device& device,
                       const std::function<void(const Region&)>& call);

/// That one of these for which the launch is estimated to be fastest.
///
/// Args:
///   problem: what is computed.
///   rows, columns: shapes of a warp's tile and of a group, with kRows and kColumns tokens.
///   kernel: which one.
///   places: where its tokens lie.
///   device: what it has.
///   region: the result.
///
/// Returns:
///   An error where tiles are not of that many tokens, or where there is no region: the box of one tile is too large
///   for shared memory, or, for the kernel of whole layouts, that of all tiles.
Status choose_region(const Problem& problem, const std::int64_t (&rows)[kRank], const std::int64_t (&columns)[kRank],
                     Kernel kernel, Places places, const Device& device, Region& region);

/// A kernel of a pass, and the region that it is launched with.
struct Launch {
  Kernel kernel;
  Region region;
};

/// What a pass launches with tiles, but for the gradients of additional tokens, and how long all of it takes.
struct PassEstimate {
  std::vector<Launch> launches;
  double seconds;
};

/// Estimates a pass. Windows of queries and those of keys are alike: in the backward pass, the kernel that owns queries
/// takes the shape of key/value tiles for theirs.
///
/// Returns:
///   An error where the kernels do not take them.
Status estimate_pass(const Problem& problem, const TileShapes& tiles, bool is_backward, const Device& device,
                     PassEstimate& estimate);

/// The width that heads of a problem are compiled for; 0 where they are too wide.
int compiled_head_dim(const Problem& problem);

}  // namespace natten_jax::small
