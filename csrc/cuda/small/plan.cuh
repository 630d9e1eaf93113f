// Setup that a CTA computes once for its region, before it loops over batch entries and heads.
#pragma once

#include <climits>

#include "cuda/small/bias_table.h"
#include "cuda/small/region_axis.cuh"
#include "cuda/small/region_order.cuh"
#include "cuda/warp/shared_memory.cuh"

namespace natten_jax::small {

/// Layout of the columns of two arrays in a stage. With boxes, each array has a box, which TMA loads and swizzles.
/// Without boxes, all threads copy chunks, and a row of shared memory has a column's chunks of both arrays.
template <int kHeadDim, bool kHasBoxes>
struct ColumnRows {
  static constexpr int kBytes = (kHasBoxes ? 2 : 4) * kHeadDim;

  /// Returns the number with which TMA's swizzle XORs the indices of the chunks in a row of a box.
  CUTE_DEVICE static int permutation(int row) { return kHeadDim == 32 ? row >> 1 & 3 : row & 7; }

  /// Returns the address in the second array of the chunk that has address `address` in the first array. With boxes,
  /// the distance between the two addresses is `distance` bytes.
  CUTE_DEVICE static std::uint32_t in_second(std::uint32_t address, int distance) {
    return kHasBoxes ? address + distance : kHeadDim == 32 ? address ^ 64 : address + 2 * kHeadDim;
  }
};

/// Head widths of arrays in global memory. If TMA loads columns, both equal the compiled width.
template <int kHeadDim, bool kHasBoxes>
struct HeadDims {
  int key, value;

  CUTE_DEVICE explicit HeadDims(const CommonParams& p)
      : key(kHasBoxes ? kHeadDim : p.head_dim), value(kHasBoxes ? kHeadDim : p.head_dim_v) {}
};

/// Byte offsets at which a lane reads the first array with ldmatrix, relative to the offset of a pair of groups.
/// `across` is for products that sum over head elements, such as logits, and `along` for products that sum over
/// columns.
struct Lanes {
  std::uint32_t across, along;
};

/// Per-warp setup: sizes of the warp's tables, and the offsets at which its lanes read.
struct TilePlan {
  int pairs;  // pairs of groups in the window; additional pairs follow, starting at the next even index
  Lanes lanes, lanes_additional;
  std::uint32_t statistic;            // byte offset in a stage of the statistics of the lane's first column
  std::uint32_t next_statistic;       // distance in bytes to the statistics of the lane's second column
  std::uint32_t next_group;           // distance in bytes to the statistics of the next group
  std::uint32_t statistic_of_column;  // byte offset in a stage of the statistics of column lane % 16
  int column_of_row;  // if rows are also columns of the box: the column that is row lane % 16; without such a row, any
                      // column
  std::uint32_t row;  // if rows are also columns of the box: offset at which the lane reads the rows as an MMA operand
  bool has_rows;
  // For a relative bias:
  // - `entry`: byte offsets in a stage of two table entries, for the lane's two rows and its first column.
  // - `next_entry`, `next_entry_of_group`: distances in bytes to the entries for the lane's next column and for the
  //   next group. If rows are keys, these distances are negative, because offsets (key minus query) decrease from one
  //   query to the next.
  int entry[2], next_entry, next_entry_of_group;
  // For the gradient of a relative bias:
  // - `sums`: byte offsets in shared memory of the sums for the lane's two rows and its first column, rounded up to a
  //   word.
  // - `next_sum_of_group`: distance in bytes to the sums for the next group.
  // - `late_rows`: masks with a half-word per row. All bits of the half-word are set if the row is "late": sums of a
  //   late row would start at an odd half-word, and are stored one half-word later.
  // - `least_offset`: the tile's smallest offset in each dimension.
  // - `number`: the index of the tile in the layout.
  int sums[2], next_sum_of_group;
  std::uint32_t late_rows[2];
  int least_offset[kRank], number;
  // With key biases: the token of the lane's column in the first pair of groups.
  int key;
};

/// Returns the index of a tile's row in Tables::row_indices, where rows i and i + 8 are adjacent.
CUTE_DEVICE constexpr int index_of_row(int row) {
  return row % 8 * 2 + row / 8;
}

/// A CTA's tables in shared memory. `column_offsets` is used if threads copy the columns.
struct Tables {
  int2* column_offsets;
  std::uint32_t* offsets;
  std::uint32_t* entries;      // per pair: distances from the first pair. Relative bias: bytes in the table (lower
                               // half-word) and in the sums (upper half-word). Key biases: tokens.
  const std::uint16_t* masks;  // a lane's mask bytes: two pairs per element
  // For rows i and i + 8 of the warp's tile: their indices in an array with one row per token and head, counted from
  // the row of the current batch entry and head. Negative if the tile does not have the row.
  const int2* row_indices;
  std::uint32_t key_bias;  // the lane's address of the key biases of the first pair of groups
  char* stages;
  int second;       // distance in bytes between the boxes of the two arrays
  int columns;      // columns of the region
  int full_passes;  // passes in which every thread copies a chunk; in another pass, some threads copy the remaining
                    // chunks
};

/// Returns the base-2 logarithm of a power of two.
CUTE_DEVICE int logarithm(int power) {
  return 31 - __clz(power);
}

/// Masks of a lane: a byte per pair of groups. The bytes of two pairs that are computed together are adjacent. The low
/// half of a byte belongs to the pair's first group, and the high half to the second group. In each half, the highest
/// bit belongs to the first of the lane's four elements. A bit is set if its element is hidden (masked out).
struct MaskBytes {
  std::uint8_t* bytes;

  CUTE_DEVICE std::uint8_t& operator[](int pair) const { return bytes[pair / 2 * 64 + pair % 2]; }
};

/// Returns a word with a nibble for each of eight groups. The lowest bit is set in the nibbles of groups `begin` to
/// `end - 1`.
CUTE_DEVICE std::uint32_t range_of_groups(int begin, int end) {
  // shl.b32 gives 0 for shifts of 32 bits and more; in C++ they are undefined.
  const auto from = [](int group) {
    std::uint32_t result;
    asm("shl.b32 %0, %1, %2;" : "=r"(result) : "r"(0x11111111u), "r"(4 * max(group, 0)));
    return result;
  };
  return from(begin) & ~from(end);
}

/// Computes the plan of a CTA and fills its tables. Returns false if the region has no rows. All threads have to call
/// this function. Before threads use the tables, the CTA has to synchronize; if a warp uses only its own tables, it
/// suffices that this warp synchronizes.
///
/// Calls `loads.start` as soon as the first column of the region's box is known, with the column's local token in each
/// dimension. Calls `load_first_rows` as soon as the rows' tokens are known. `layout` is the layout of the batch
/// entries that the plan is for. `number` is the plan's index in kernels with two plans.
///
/// `kIsWhole`: true if a region is a whole dilation group of a plain problem without additional columns. Plans are then
/// a third shorter. This matters for CTAs with few items, because a kernel's first instructions miss the instruction
/// cache.
template <int kHeadDim, Owner kOwner, bool kHasBoxes, Feature kFeature, bool kIsWhole = false, class Loads,
          class LoadFirstRows>
CUTE_DEVICE bool make_plan(const CommonParams& p, char* raw, Tables& tables, TilePlan& tile, Loads& loads,
                           const LoadFirstRows& load_first_rows, const EntryLayout& layout = {}, int number = 0) {
  using Columns = ColumnRows<kHeadDim, kHasBoxes>;
  constexpr int kColumnBytes = Columns::kBytes;
  constexpr bool kRowsAreKeys = kOwner == Owner::kKeys, kHasBias = kFeature == Feature::kRelativeBias,
                 kHasKeyBias = kFeature == Feature::kKeyBias && !kRowsAreKeys;
  constexpr bool kMayWrap = Loads::kMayWrap, kIsPlain = Loads::kIsPlain || kIsWhole;
  const Region& region = p.region;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32,
            table_begin = (number * region.warps + warp) * region.table_capacity;
  tables.column_offsets = reinterpret_cast<int2*>(raw + region.shared.column_offsets);
  tables.offsets = reinterpret_cast<std::uint32_t*>(raw + region.shared.offsets) + table_begin;
  tables.entries = reinterpret_cast<std::uint32_t*>(raw + region.shared.entries) + table_begin;
  const MaskBytes masks{reinterpret_cast<std::uint8_t*>(raw + region.shared.masks) + table_begin * 32 + 2 * lane};
  int* row_indices = reinterpret_cast<int*>(raw + region.shared.row_indices) + warp * kRows;
  tables.masks = reinterpret_cast<const std::uint16_t*>(masks.bytes);
  tables.row_indices = reinterpret_cast<const int2*>(row_indices);
  if constexpr (kHasKeyBias) {
    tables.key_bias = shared_address(raw) + region.shared.key_bias + table_begin * kKeyBiasBytes + lane % 4 * 16;
  }
  tables.stages = raw + region.shared.stages;
  tables.second = region.shared.second;

  // In each dimension: the tile's number of rows, the index of its first row in the region, and this row's local token.
  // `row_columns` is the range of columns that a row sees: in lanes 0 to 15 a row of the tile, in lane 16 the tile's
  // last row, in lane 17 the region's first row, and in later lanes the region's last row.
  int tile_rows[kRank], begin_of_tile[kRank], first_row[kRank], offset[kRank];
  int2 row_columns[kRank], tile_columns[kRank];
  // In each dimension: the index of the region's first column in its dilation group, the number of columns, and the
  // local token of the first column.
  int first[kRank], extent[kRank], first_column[kRank];
  int id = blockIdx.x, tile_id = warp, warps_with_rows = 1;
  [[maybe_unused]] bool crosses_seam = false;
  [[maybe_unused]] RegionPosition region_position;
  if constexpr (kMayWrap) region_position = find_cut_regions_first(p, id);

  tile.has_rows = true;
  tile.number = 0;
  CUTE_UNROLL
  for (int d = 0; d < kRank; ++d) {
    if (p.is_single[d]) {
      tile_rows[d] = extent[d] = 1;
      begin_of_tile[d] = first_row[d] = first[d] = first_column[d] = 0;
      row_columns[d] = tile_columns[d] = make_int2(0, 1);
      offset[d] = tile.least_offset[d] = 0;
      continue;
    }
    const DeviceAxis& axis = p.axis[d];
    int residue, region_number, tile_index;
    if constexpr (kMayWrap) {
      residue = region_position.residue[d];
      region_number = region_position.number[d];
    } else {
      axis.by_dilation(id, residue, id);
      p.by_regions[d](id, region_number, id);
    }
    p.by_tiles[d](tile_id, tile_index, tile_id);
    const int most = region.tile[d] * region.tiles[d];
    const auto rows = RegionAxis<kRowsAreKeys, kMayWrap>::template for_layout<kIsPlain>(
        p, layout, d, residue, {region_number * most, most, region.tile[d]});
    if (rows.count <= 0) return false;
    const int begin = tile_index * region.tile[d];
    begin_of_tile[d] = begin;
    tile_rows[d] = min(region.tile[d], rows.count - begin);
    tile.has_rows &= tile_rows[d] > 0;
    warps_with_rows *= (rows.count + region.tile[d] - 1) >> logarithm(region.tile[d]);
    const int lane_row = begin + (lane < kRows ? min(lane, tile_rows[d] - 1)
                                  : lane == 16 ? tile_rows[d] - 1
                                  : lane == 17 ? -begin
                                               : rows.count - 1 - begin);
    row_columns[d] = rows.visible_range(axis, lane_row);
    first[d] = kIsWhole ? 0 : __shfl_sync(0xffffffffu, row_columns[d].x, 17);
    extent[d] = max(__shfl_sync(0xffffffffu, row_columns[d].y, 18) - first[d], 0);
    first_column[d] = rows.columns().residue + first[d] * axis.dilation;
    if constexpr (kMayWrap) {
      crosses_seam |= rows.wraps(axis) && (first[d] < 0 || first[d] + extent[d] > rows.columns().length);
    }
    first_row[d] = rows.rows().residue + (rows.begin + begin) * axis.dilation;
    // Rows past the tile or outside of the layout see no columns.
    const bool is_row = lane < tile_rows[d] && rows.is_inside(lane_row);
    tile_columns[d] =
        make_int2(__shfl_sync(0xffffffffu, row_columns[d].x, 0), __shfl_sync(0xffffffffu, row_columns[d].y, 16));
    if constexpr (kHasBias) {
      offset[d] = rows.offset(axis, lane_row, tile_columns[d].x);
      if constexpr (!kRowsAreKeys) {
        const int first_visible =
            is_row && row_columns[d].y > row_columns[d].x ? offset[d] + row_columns[d].x - tile_columns[d].x : INT_MAX;
        const int least = __reduce_min_sync(0xffffffffu, first_visible);
        tile.least_offset[d] = least == INT_MAX ? 0 : least;
      }
      tile.number +=
          (residue * axis.q_tiles + ((region_number * most + begin) >> logarithm(region.tile[d]))) * p.tile_pitch[d];
    }
    if (!is_row) row_columns[d].y = row_columns[d].x;
  }
  if constexpr (kMayWrap) {
    loads.start(first_column, warps_with_rows, crosses_seam);
  } else {
    loads.start(first_column, warps_with_rows);
  }

  // In each dimension: the tile's first column relative to the region's first column, and the tile's number of groups.
  // For the lane's two rows: the range of columns that they see, relative to the tile's first column.
  int tile_begin[kRank], groups[kRank], window_begin[2][kRank], window_end[2][kRank];
  int row_token = 0, row_shift = 0, first_token = 0, token_pitch[kRank];
  tile.column_of_row = 0;
  bool has_row = true;
  CUTE_UNROLL
  for (int d = 0; d < kRank; ++d) {
    const int dilation = p.axis[d].dilation, first_of_tile = tile_columns[d].x;
    token_pitch[d] = (kRowsAreKeys ? p.query_pitch : p.kv_pitch)[d];
    first_token += first_column[d] * token_pitch[d];
    token_pitch[d] *= dilation;
    tile_begin[d] = first_of_tile - first[d];
    groups[d] = (max(tile_columns[d].y - first_of_tile, 0) + region.group[d] - 1) >> logarithm(region.group[d]);
    // The tile's extents are powers of two, because their product is 16.
    const auto coordinate_of = [&](int row) { return row >> row_shift & (region.tile[d] - 1); };
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      window_begin[r][d] = 0;
      window_end[r][d] = 1;
      if (p.is_single[d]) continue;
      const int coordinate = coordinate_of(lane / 4 + 8 * r);
      window_begin[r][d] = __shfl_sync(0xffffffffu, row_columns[d].x, coordinate) - first_of_tile;
      window_end[r][d] = __shfl_sync(0xffffffffu, row_columns[d].y, coordinate) - first_of_tile;
    }
    const int coordinate = coordinate_of(lane % kRows);
    row_shift += logarithm(region.tile[d]);
    has_row &= coordinate < tile_rows[d];
    tile.column_of_row += (begin_of_tile[d] + min(coordinate, max(tile_rows[d] - 1, 0))) * region.pitch[d];
    row_token += (first_row[d] + coordinate * dilation) * (kRowsAreKeys ? p.kv_pitch : p.query_pitch)[d];
  }
  if (lane < kRows) {
    row_indices[index_of_row(lane)] = has_row ? row_token * (kRowsAreKeys ? p.heads_kv : p.heads) : -1;
  }
  __syncwarp();
  load_first_rows();

  const int wide = region.group[0], high = region.group[1], wide_shift = logarithm(wide), shift = logarithm(high);
  const auto swizzle = [&](int x, int y) { return (x & (wide - 1)) | (y & (high - 1)) * wide; };
  tables.columns = extent[0] * extent[1] * extent[2];
  if (!kHasBoxes || crosses_seam) {
    const int columns_per_pass = blockDim.x / (kColumnBytes / 16);
    tables.full_passes = tables.columns / columns_per_pass;
    // Returns the distance in tokens to add to the token of a column. It is not zero if the column lies past the seam,
    // the edge at which a wrapped dimension continues at its other end.
    [[maybe_unused]] const auto across_seam = [&](int d, int column) {
      const DeviceAxis& axis = p.axis[d];
      const int at = first_column[d] + column * axis.dilation;
      const int wrap_distance = at < 0 ? axis.kv_extent : at >= axis.kv_extent ? -axis.kv_extent : 0;
      return axis.ends == Ends::kWrap ? wrap_distance * (kRowsAreKeys ? p.query_pitch : p.kv_pitch)[d] : 0;
    };
    for (int i = threadIdx.x; i < tables.columns; i += blockDim.x) {
      const int line = i / extent[0], x = i - line * extent[0], z = line / extent[1], y = line - z * extent[1];
      const int stage_row = x + y * region.pitch[1] + z * region.pitch[2];
      int token = first_token + x * token_pitch[0] + y * token_pitch[1] + z * token_pitch[2];
      if constexpr (kMayWrap) token += across_seam(0, x) + across_seam(1, y) + across_seam(2, z);
      tables.column_offsets[i] = make_int2(
          token, stage_row * kColumnBytes | (kHasBoxes ? Columns::permutation(stage_row) : swizzle(x, y)) << 4);
    }
  }

  if constexpr (kHasBias) {
    constexpr int kSign = kRowsAreKeys ? -1 : 1;
    const int column_x = lane % 4 * 2 & (wide - 1), column_y = lane % 4 * 2 >> wide_shift;
    tile.next_entry = region.next_entry[kRowsAreKeys];
    tile.next_entry_of_group = region.next_entry_of_group[kRowsAreKeys];
    tile.next_sum_of_group = region.next_sum_of_group;
    const auto is_late = [&](int sum) { return (sum & 1) != 0; };
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      int entry = kSign * (column_x * region.table_pitch[0] + column_y * region.table_pitch[1]),
          sum = column_x * region.sum_pitch[0] + column_y * region.sum_pitch[1], shift_of_row = 0;
      CUTE_UNROLL
      for (int d = 0; d < kRank; ++d) {
        const int coordinate = (lane / 4 + 8 * r) >> shift_of_row & (region.tile[d] - 1);
        shift_of_row += logarithm(region.tile[d]);
        const int row_offset = __shfl_sync(0xffffffffu, offset[d], coordinate);
        entry += row_offset * region.table_pitch[d];
        if constexpr (!kRowsAreKeys) sum += (row_offset - tile.least_offset[d]) * region.sum_pitch[d];
      }
      tile.entry[r] = region.shared.table + kBytesOfEntry * (region.table_margin + entry);
      if constexpr (!kRowsAreKeys) {
        const int row = region.shared.sums + (warp * kRows + lane / 4 + 8 * r) * bytes_of_sums_row(region.record);
        tile.sums[r] = row + kBytesOfSum * (sum + is_late(sum));
        // Check if rows 2 * (lane % 4) + 8 * r and the next row are late. The lanes that hold these rows vote.
        const unsigned late = __ballot_sync(0xffffffffu, is_late(sum));
        const unsigned late_bits = late >> (lane % 4 * 8);
        tile.late_rows[r] = ((late_bits & 1) != 0 ? 0xffffu : 0u) | ((late_bits & 0x10) != 0 ? 0xffff0000u : 0u);
      }
    }
  }

  const int pair_rows = high * region.pitch[1], in_group = lane & (kColumns - 1);
  const int x = in_group & (wide - 1), y = in_group >> wide_shift;
  const int base = tile_begin[0] + tile_begin[1] * region.pitch[1] + tile_begin[2] * region.pitch[2];
  if constexpr (kHasKeyBias) {
    tile.key = first_token + (tile_begin[0] + x) * token_pitch[0] + tile_begin[2] * token_pitch[2] +
               (tile_begin[1] + y + lane / kColumns % 2 * high) * token_pitch[1];
  }
  const auto lane_of = [&](int group, int chunk) {
    const int row = base + x + y * region.pitch[1] + group * pair_rows;
    const int permuted =
        chunk ^ (kHasBoxes ? Columns::permutation(row) : swizzle(x + tile_begin[0], y + tile_begin[1]));
    return static_cast<std::uint32_t>(row * kColumnBytes | permuted << 4);
  };
  const auto lane_of_sequence = [&](int group, int chunk) {
    return region.shared.additional +
           static_cast<std::uint32_t>((8 * group + in_group) * kColumnBytes | (chunk ^ in_group) << 4);
  };
  // ldmatrix loads the four matrices of a step: two groups times two chunks. The lane provides the address of a row of
  // matrix lane / 8. For `across`, lane / 16 selects the group, and lane / 8 % 2 the chunk. For `along`, it is the
  // reverse.
  const int slow = lane / 16, fast = lane / 8 % 2;
  tile.lanes = {lane_of(slow, fast), lane_of(fast, slow)};
  tile.lanes_additional = {lane_of_sequence(slow, fast), lane_of_sequence(fast, slow)};
  tile.row = tile.column_of_row * kColumnBytes | (slow ^ Columns::permutation(tile.column_of_row)) << 4;
  const int column = lane % 4 * 2;
  const auto statistic_of = [&](int at, int group) {
    const int row = base + (at & (wide - 1)) + (at >> wide_shift) * region.pitch[1] + group * pair_rows;
    return region.shared.statistics + kStatisticsBytes * static_cast<std::uint32_t>(row);
  };
  tile.statistic = statistic_of(column, 0);
  tile.next_statistic = region.next_statistic;
  tile.next_group = region.next_group;
  tile.statistic_of_column = statistic_of(in_group, lane / 8 % 2);

  const int line_pairs = (groups[1] + 1) / 2;
  tile.pairs = tile.has_rows ? groups[0] * groups[2] * line_pairs : 0;
  int written = 0;
  if (tile.pairs > 0) {
    for (int gz = 0; gz < groups[2]; ++gz) {
      for (int gx = 0; gx < groups[0]; ++gx) {
        const int line = gx * wide + gz * region.pitch[2];
        for (int i = lane; i < line_pairs; i += 32) {
          tables.offsets[written + i] = (line + 2 * i * pair_rows) * kColumnBytes;
          if constexpr (kHasBias) {
            const auto behind = [&](const int (&pitch)[kRank]) {
              return static_cast<std::uint32_t>(gx * wide * pitch[0] + gz * pitch[2] + 2 * i * high * pitch[1]);
            };
            tables.entries[written + i] =
                kBytesOfEntry * behind(region.table_pitch) | kBytesOfSum * behind(region.sum_pitch) << kEntryBits;
          }
          if constexpr (kHasKeyBias) {
            tables.entries[written + i] =
                gx * wide * token_pitch[0] + gz * token_pitch[2] + 2 * i * high * token_pitch[1];
          }
        }
        const int line_begin = written;
        written += line_pairs;
        int begin[4], end[4];
        CUTE_UNROLL
        for (int e = 0; e < 4; ++e) {
          const int r = e / 2, at = column + e % 2, ex = gx * wide + (at & (wide - 1)), ey = at >> wide_shift;
          const bool is_visible =
              ex >= window_begin[r][0] && ex < window_end[r][0] && gz >= window_begin[r][2] && gz < window_end[r][2];
          begin[e] = (window_begin[r][1] - ey + high - 1) >> shift;
          end[e] = is_visible ? (window_end[r][1] - ey + high - 1) >> shift : 0;
        }
        for (int i = 0; i < line_pairs; i += 4) {
          std::uint32_t visible_bits = 0;
          CUTE_UNROLL
          for (int e = 0; e < 4; ++e) visible_bits |= range_of_groups(begin[e] - 2 * i, end[e] - 2 * i) << (3 - e);
          CUTE_UNROLL
          for (int j = 0; j < 4; ++j) {
            if (i + j < line_pairs) masks[line_begin + i + j] = static_cast<std::uint8_t>(~visible_bits >> (8 * j));
          }
        }
      }
    }
  }
  __syncwarp();
  const int additional_pairs = kIsWhole ? 0 : p.additional_pairs();
  written += written & 1;
  for (int i = lane; i < additional_pairs; i += 32) {
    tables.offsets[written + i] = i * 16 * kColumnBytes;
  }
  for (int i = 0; i < additional_pairs; ++i) {
    const int2 indices = tables.row_indices[lane / 4];
    std::uint32_t bits = 0;
    CUTE_UNROLL
    for (int j = 0; j < 8; ++j) {
      const int group = j / 4, e = j % 4;
      const bool is_hidden =
          (e / 2 == 0 ? indices.x : indices.y) < 0 || (2 * i + group) * kColumns + column + e % 2 >= p.additional_kv;
      bits |= is_hidden ? 8u << (4 * group) >> e : 0u;
    }
    masks[written + i] = static_cast<std::uint8_t>(bits);
  }
  __syncwarp();
  return true;
}

}  // namespace natten_jax::small
