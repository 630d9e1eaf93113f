// What a CTA works out once about its region, before it goes over batch entries and heads.
#pragma once

#include "cuda/common/axis_plan.cuh"
#include "cuda/small/params.h"

namespace natten_jax::small {

/// One dimension of a region, seen from its rows.
template <bool kRowsAreKeys>
struct RegionAxis {
  GroupTokens query, kv;
  int begin;  // index of the region's first row
  int count;  // its rows; none where it is not positive

  CUTE_DEVICE RegionAxis(const DeviceAxis& axis, int residue, int begin, int most, Origin query_origin,
                         Origin kv_origin)
      : query(GroupTokens::of_queries(axis, group_of(axis, residue, kRowsAreKeys ? kv_origin : query_origin),
                                      query_origin)),
        kv(GroupTokens::of_keys(axis, group_of(axis, residue, kRowsAreKeys ? kv_origin : query_origin), kv_origin)),
        begin(begin),
        count(min(most, rows().local_length - begin)) {}

  /// Of a plain problem.
  CUTE_DEVICE RegionAxis(const DeviceAxis& axis, int residue, int begin, int most) : begin(begin) {
    const int length = group_length(axis, axis.query_extent, residue);
    query = kv = {residue, 0, length, length};
    count = min(most, length - begin);
  }

  CUTE_DEVICE static RegionAxis of(const CommonParams& p, int d, int residue, int begin, int most) {
    const DeviceAxis& axis = p.axis[d];
    if (p.is_plain) return RegionAxis(axis, residue, begin, most);
    const int dimension = p.region.dimension[d];
    return RegionAxis(axis, residue, begin, most, Origin::load(p.origins, dimension, axis.dilation),
                      Origin::load(p.origins, kRank + dimension, axis.dilation));
  }

  CUTE_DEVICE const GroupTokens& rows() const { return kRowsAreKeys ? kv : query; }
  CUTE_DEVICE const GroupTokens& columns() const { return kRowsAreKeys ? query : kv; }

  /// Local columns that a row of the region sees or is seen by, from begin to end. Both grow with the row: a key
  /// outside of the layout is as the nearest one inside.
  CUTE_DEVICE int2 seen(const DeviceAxis& axis, int row) const {
    row += begin;
    Range<int> window;
    if constexpr (kRowsAreKeys) {
      const int index = min(max(row + kv.shift, 0), kv.length - 1);
      window = inverse_window_bounds(axis, index, query.length, kv.length);
    } else {
      window = window_bounds(axis, row + query.shift, kv.length);
    }
    const int shift = columns().shift;
    return make_int2(max(window.begin - shift, 0), min(max(window.end - shift, 0), columns().local_length));
  }

  /// Whether a row's token lies in the global layout; queries do.
  CUTE_DEVICE bool is_inside(int row) const {
    return !kRowsAreKeys || (row + begin + kv.shift >= 0 && row + begin + kv.shift < kv.length);
  }
};

/// How the columns of two arrays lie in a stage: a column's chunks of both in one row, which all threads copy, or a box
/// of each, which the copy engine swizzles.
template <int kHeadDim, bool kHasBoxes>
struct ColumnRows {
  static constexpr int kBytes = (kHasBoxes ? 2 : 4) * kHeadDim;

  /// What the numbers of a row's chunks are permuted by, in boxes.
  CUTE_DEVICE static int permutation(int row) { return kHeadDim == 32 ? row >> 1 & 3 : row & 7; }

  /// Where a chunk of the first array has its counterpart in the second, whose box lies `distance` further.
  CUTE_DEVICE static std::uint32_t in_second(std::uint32_t address, int distance) {
    return kHasBoxes ? address + distance : kHeadDim == 32 ? address ^ 64 : address + 2 * kHeadDim;
  }
};

/// What a lane adds to where a pair of groups lies, for operands whose columns are rows of shared memory, as in
/// products with logits for results, and for those whose columns are summed over; of the first array.
struct Lanes {
  std::uint32_t across, along;
};

/// The lists of a warp's entries: pairs of groups that the first tile alone sees, those that both do, and those that the
/// second alone does. Of pairs of one tile, an entry has two.
enum List { kFirst, kBoth, kSecond };

/// What a warp reads its masks and groups from, and where its lanes read.
struct TilePlan {
  int entries[3];  // of each list of the window; additional ones follow
  bool is_odd;     // whether the last entry of the first list has but one pair, where a warp has one tile
  Lanes lanes, lanes_additional;
  std::uint32_t statistic;       // the same for the statistics of its first column, and how far that of the second and
  std::uint32_t next_statistic;  // those of the next group are
  std::uint32_t next_group;
  std::uint32_t statistic_of_column;  // the same for those of column lane % 16
  bool has_rows;

  CUTE_DEVICE int all_entries() const { return entries[kFirst] + entries[kBoth] + entries[kSecond]; }
};

/// The tables of a CTA in shared memory; there are places where there are no boxes.
struct Tables {
  int2* places;
  uint2* offsets;
  const std::uint16_t* masks;  // of a lane; a byte for each pair of an entry
  const int* row_tokens;
  char* stages;
  int second;   // bytes between the boxes of the two arrays
  int columns;  // of the region
  int passes;   // in which all threads copy them, each a chunk of a column
};

/// Of a power of two, in base 2.
CUTE_DEVICE int logarithm(int power) {
  return 31 - __clz(power);
}

/// A lane's bits of a pair of groups: `is_seen(group, element)` for the four elements of the first, then those of the
/// second, highest bit first; a number's sign says whether an element is hidden.
template <class Hidden>
CUTE_DEVICE std::uint8_t hidden_bits(const Hidden& hidden) {
  std::uint32_t bits = 0;
  CUTE_UNROLL
  for (int i = 0; i < 8; ++i) bits = __funnelshift_l(hidden(i / 4, i % 4), bits, 1);
  return static_cast<std::uint8_t>(bits);
}

/// Writes a warp's entries, of one tile or two.
template <int kTiles>
struct EntryTable {
  uint2* offsets;
  std::uint8_t* masks;  // of the lane

  /// Of a tile alone: its pair with this number among those of the list that starts at an entry.
  CUTE_DEVICE void single(int entry, int number, std::uint32_t offset, std::uint8_t bits) const {
    write(entry + number / 2, number % 2, offset, bits);
  }
  CUTE_DEVICE void both(int entry, std::uint32_t offset, std::uint8_t first, std::uint8_t second) const {
    write(entry, 0, offset, first);
    write(entry, 1, offset, second);
  }

 private:
  CUTE_DEVICE void write(int entry, int part, std::uint32_t offset, std::uint8_t bits) const {
    if (threadIdx.x % 32 == 0) reinterpret_cast<std::uint32_t*>(offsets + entry)[part] = offset;
    masks[64 * entry + part] = bits;
  }
};

/// Fills the tables; false where the region has no rows. All threads have to call it, and to meet before they use the
/// tables; a lane's own warp has to meet before it uses its part. `loads` starts as soon as the first column of
/// the region's box is known, by its local token in each dimension.
template <int kHeadDim, bool kRowsAreKeys, bool kHasBoxes, int kTiles, class Loads>
CUTE_DEVICE bool make_plan(const CommonParams& p, char* raw, Tables& tables, TilePlan& tile, Loads& loads) {
  using Columns = ColumnRows<kHeadDim, kHasBoxes>;
  constexpr int kColumnBytes = Columns::kBytes;
  const Region& region = p.region;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  tables.places = reinterpret_cast<int2*>(raw + region.shared.places);
  tables.offsets = reinterpret_cast<uint2*>(raw + region.shared.offsets) + warp * region.entries;
  const EntryTable<kTiles> table{
      tables.offsets, reinterpret_cast<std::uint8_t*>(raw + region.shared.masks) + warp * region.entries * 64 + 2 * lane};
  int* row_tokens = reinterpret_cast<int*>(raw + region.shared.row_tokens) + warp * kRows * kTiles;
  tables.masks = reinterpret_cast<const std::uint16_t*>(table.masks);
  tables.row_tokens = row_tokens;
  tables.stages = raw + region.shared.stages;
  tables.second = region.shared.second;

  // Rows of the warp and where they begin. A lane looks at one of them, three at the last one of the warp and the ends
  // of the region; where each lane may have a row, all look at the ends once more.
  int block_rows[kRank], first_row[kRank];
  int2 seen[kRank], of_block[kRank];
  // In dimension 1, where the columns of the first tile end and those of the second one begin.
  int first_end = 0, second_begin = 0;
  // The columns of the region: where they begin, how many there are.
  int first[kRank], extent[kRank], first_column[kRank];
  int id = blockIdx.x, block_id = warp, warps_with_rows = 1;
  tile.has_rows = true;
  CUTE_UNROLL
  for (int d = 0; d < kRank; ++d) {
    if (p.is_single[d]) {
      block_rows[d] = extent[d] = 1;
      first_row[d] = first[d] = first_column[d] = 0;
      seen[d] = of_block[d] = make_int2(0, 1);
      if (d == 1) first_end = 1;
      continue;
    }
    const DeviceAxis& axis = p.axis[d];
    const bool is_stacked = kTiles > 1 && d == 1;
    int residue, number, of_region;
    axis.by_dilation(id, residue, id);
    p.by_regions[d](id, number, id);
    p.by_blocks[d](block_id, of_region, block_id);
    const int most = region.block[d] * region.blocks[d];
    const auto rows = RegionAxis<kRowsAreKeys>::of(p, d, residue, number * most, most);
    if (rows.count <= 0) return false;
    const int begin = of_region * region.block[d];
    block_rows[d] = min(region.block[d], rows.count - begin);
    tile.has_rows &= block_rows[d] > 0;
    warps_with_rows *= (rows.count + region.block[d] - 1) >> logarithm(region.block[d]);
    const int last = block_rows[d] - 1;
    int looked_at = min(lane, last);
    if (!is_stacked && lane >= kRows) looked_at = lane == 16 ? last : lane == 17 ? -begin : rows.count - 1 - begin;
    seen[d] = rows.seen(axis, begin + looked_at);
    const int2 ends = is_stacked ? rows.seen(axis, lane == 17 ? 0 : rows.count - 1) : seen[d];
    first[d] = __shfl_sync(0xffffffffu, ends.x, 17);
    extent[d] = max(__shfl_sync(0xffffffffu, ends.y, 18) - first[d], 0);
    first_column[d] = rows.columns().residue + first[d] * axis.dilation;
    first_row[d] = rows.rows().residue + (rows.begin + begin) * axis.dilation;
    of_block[d] = make_int2(__shfl_sync(0xffffffffu, seen[d].x, 0),
                            __shfl_sync(0xffffffffu, seen[d].y, is_stacked ? region.block[d] - 1 : 16));
    if (is_stacked) {
      first_end = __shfl_sync(0xffffffffu, seen[d].y, region.tile[d] - 1) - of_block[d].x;
      second_begin = __shfl_sync(0xffffffffu, seen[d].x, region.tile[d]) - of_block[d].x;
    }
    // The others see nothing.
    const bool is_row = lane < block_rows[d] && rows.is_inside(begin + looked_at);
    if (!is_row) seen[d].y = seen[d].x;
  }
  loads.start(first_column, warps_with_rows);

  // The columns of the warp, in the region's; and for the lane's two rows of each tile, in the warp's.
  int block_begin[kRank], groups[kRank], window_begin[2][kRank], window_end[2][kRank];
  int second_window_begin[2], second_window_end[2];
  int row_token = 0, row_shift = 0, first_token = 0, token_pitch[kRank];
  bool has_row = true;
  CUTE_UNROLL
  for (int d = 0; d < kRank; ++d) {
    const int dilation = p.axis[d].dilation, first_of_block = of_block[d].x;
    const bool is_stacked = kTiles > 1 && d == 1;
    token_pitch[d] = (kRowsAreKeys ? p.query_pitch : p.kv_pitch)[d];
    first_token += first_column[d] * token_pitch[d];
    token_pitch[d] *= dilation;
    block_begin[d] = first_of_block - first[d];
    groups[d] = (max(of_block[d].y - first_of_block, 0) + region.group[d] - 1) >> logarithm(region.group[d]);
    // Extents that divide 16 are powers of two.
    const auto place_of = [&](int row) { return row >> row_shift & (region.tile[d] - 1); };
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      window_begin[r][d] = 0;
      window_end[r][d] = 1;
      if (is_stacked) second_window_begin[r] = second_window_end[r] = 0;
      if (p.is_single[d]) continue;
      const int place = place_of(lane / 4 + 8 * r);
      window_begin[r][d] = __shfl_sync(0xffffffffu, seen[d].x, place) - first_of_block;
      window_end[r][d] = __shfl_sync(0xffffffffu, seen[d].y, place) - first_of_block;
      if (is_stacked) {
        second_window_begin[r] = __shfl_sync(0xffffffffu, seen[d].x, place + region.tile[d]) - first_of_block;
        second_window_end[r] = __shfl_sync(0xffffffffu, seen[d].y, place + region.tile[d]) - first_of_block;
      }
    }
    int place = place_of(lane % kRows);
    if (is_stacked) place += lane / kRows * region.tile[d];
    row_shift += logarithm(region.tile[d]);
    has_row &= place < block_rows[d];
    row_token += (first_row[d] + place * dilation) * (kRowsAreKeys ? p.kv_pitch : p.query_pitch)[d];
  }
  if (lane < kRows * kTiles) row_tokens[lane] = has_row ? row_token : -1;

  const int wide = region.group[0], high = region.group[1], wide_shift = logarithm(wide), shift = logarithm(high);
  const auto swizzle = [&](int x, int y) { return (x & (wide - 1)) | (y & (high - 1)) * wide; };
  tables.columns = extent[0] * extent[1] * extent[2];
  if constexpr (!kHasBoxes) {
    const int of_pass = blockDim.x / (kColumnBytes / 16);
    tables.passes = (tables.columns + of_pass - 1) / of_pass;
    // The last pass copies some column to where nobody looks.
    for (int i = tables.columns + threadIdx.x; i < tables.passes * of_pass; i += blockDim.x) {
      tables.places[i] = make_int2(first_token, region.shared.nowhere);
    }
    for (int i = threadIdx.x; i < tables.columns; i += blockDim.x) {
      const int line = i / extent[0], x = i - line * extent[0], z = line / extent[1], y = line - z * extent[1];
      const int place = x + y * region.pitch[1] + z * region.pitch[2];
      tables.places[i] = make_int2(first_token + x * token_pitch[0] + y * token_pitch[1] + z * token_pitch[2],
                                   place * kColumnBytes | swizzle(x, y) << 4);
    }
  }

  const int pair_rows = high * region.pitch[1], in_group = lane & (kColumns - 1);
  const int x = in_group & (wide - 1), y = in_group >> wide_shift;
  const int base = block_begin[0] + block_begin[1] * region.pitch[1] + block_begin[2] * region.pitch[2];
  const auto lane_of = [&](int group, int chunk) {
    const int row = base + x + y * region.pitch[1] + group * pair_rows;
    const int permuted =
        chunk ^ (kHasBoxes ? Columns::permutation(row) : swizzle(x + block_begin[0], y + block_begin[1]));
    return static_cast<std::uint32_t>(row * kColumnBytes | permuted << 4);
  };
  const auto lane_of_sequence = [&](int group, int chunk) {
    return region.shared.additional +
           static_cast<std::uint32_t>((8 * group + in_group) * kColumnBytes | (chunk ^ in_group) << 4);
  };
  // A lane's row of matrix lane / 8 of a step: of which group, and which of the step's two chunks.
  const int slow = lane / 16, fast = lane / 8 % 2;
  tile.lanes = {lane_of(slow, fast), lane_of(fast, slow)};
  tile.lanes_additional = {lane_of_sequence(slow, fast), lane_of_sequence(fast, slow)};
  const int column = lane % 4 * 2;
  const auto statistic_of = [&](int at, int group) {
    const int row = base + (at & (wide - 1)) + (at >> wide_shift) * region.pitch[1] + group * pair_rows;
    return region.shared.statistics + kStatisticsBytes * static_cast<std::uint32_t>(row);
  };
  tile.statistic = statistic_of(column, 0);
  tile.next_statistic = kStatisticsBytes * (wide > 1 ? 1 : region.pitch[1]);
  tile.next_group = kStatisticsBytes * pair_rows;
  tile.statistic_of_column = statistic_of(in_group, lane / 8 % 2);

  // Of the pairs of a line, those that the first tile sees end, and those that the second one sees begin. Where two
  // pairs of one tile are an entry, there are as many as make none of them odd.
  const int line_pairs = (groups[1] + 1) / 2, lines = tile.has_rows ? groups[0] * groups[2] : 0;
  int begin_of_second = line_pairs, end_of_first = line_pairs;
  if constexpr (kTiles > 1) {
    const int in_pair = shift + 1;
    end_of_first = min((max(first_end, 0) + (1 << in_pair) - 1) >> in_pair, line_pairs);
    if (block_rows[1] > region.tile[1]) begin_of_second = min(max(second_begin, 0) >> in_pair, end_of_first);
    if (lines * begin_of_second % 2 != 0) --begin_of_second;
    if (lines * (line_pairs - end_of_first) % 2 != 0) ++end_of_first;
    tile.entries[kFirst] = lines * begin_of_second / 2;
    tile.entries[kBoth] = lines * (end_of_first - begin_of_second);
    tile.entries[kSecond] = lines * (line_pairs - end_of_first) / 2;
    tile.is_odd = false;
  } else {
    tile.entries[kFirst] = (lines * line_pairs + 1) / 2;
    tile.entries[kBoth] = tile.entries[kSecond] = 0;
    tile.is_odd = lines * line_pairs % 2 != 0;
  }
  if (lines > 0 && line_pairs > 0) {
    int singles = 0, both = tile.entries[kFirst], second_singles = 0;
    for (int gz = 0; gz < groups[2]; ++gz) {
      for (int gx = 0; gx < groups[0]; ++gx) {
        std::uint32_t offset = (gx * wide + gz * region.pitch[2]) * kColumnBytes;
        // Of the groups of the line, those that the lane's rows see begin and end, by element.
        int begin[kTiles][4], end[kTiles][4];
        CUTE_UNROLL
        for (int e = 0; e < 4; ++e) {
          const int r = e / 2, at = column + e % 2, ex = gx * wide + (at & (wide - 1)), ey = at >> wide_shift;
          const bool is_seen =
              ex >= window_begin[r][0] && ex < window_end[r][0] && gz >= window_begin[r][2] && gz < window_end[r][2];
          const auto group_of_end = [&](int row) { return (row - ey + high - 1) >> shift; };
          begin[0][e] = group_of_end(window_begin[r][1]);
          end[0][e] = is_seen ? group_of_end(window_end[r][1]) : 0;
          if constexpr (kTiles > 1) {
            begin[1][e] = group_of_end(second_window_begin[r]);
            end[1][e] = is_seen ? group_of_end(second_window_end[r]) : 0;
          }
        }
        for (int i = 0; i < line_pairs; ++i, offset += 2 * pair_rows * kColumnBytes) {
          const auto bits = [&](int t) {
            // A difference's sign says which of two numbers is the smaller one.
            return hidden_bits([&](int g, int e) {
              const int group = 2 * i + g;
              return static_cast<std::uint32_t>((group - begin[t][e]) | (end[t][e] - 1 - group));
            });
          };
          if (i < begin_of_second) {
            table.single(0, singles++, offset, bits(0));
          } else if (i < end_of_first) {
            table.both(both++, offset, bits(0), bits(kTiles - 1));
          } else {
            table.single(tile.entries[kFirst] + tile.entries[kBoth], second_singles++, offset, bits(kTiles - 1));
          }
        }
      }
    }
  }
  __syncwarp();
  const int additional_pairs = (p.additional_kv + 15) / 16, written = tile.all_entries();
  for (int i = 0; i < additional_pairs; ++i) {
    const auto bits = [&](int t) {
      return hidden_bits([&](int group, int e) {
        const int hidden = row_tokens[kRows * t + lane / 4 + e / 2 * 8] |
                           (p.additional_kv - 1 - ((2 * i + group) * kColumns + column + e % 2));
        return static_cast<std::uint32_t>(hidden);
      });
    };
    const std::uint32_t offset = i * 16 * kColumnBytes;
    if constexpr (kTiles > 1) {
      table.both(written + i, offset, bits(0), bits(1));
    } else {
      table.single(written, i, offset, bits(0));
    }
  }
  __syncwarp();
  return true;
}

}  // namespace natten_jax::small
