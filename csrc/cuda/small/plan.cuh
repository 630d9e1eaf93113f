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

/// What a lane adds to where a pair of groups lies, for operands whose columns are rows of shared memory, as in
/// products with logits for results, and for those whose columns are summed over.
struct Lanes {
  std::uint32_t across, along;
};

/// What a warp reads its masks and groups from, and where its lanes read.
struct TilePlan {
  int pairs;  // of groups of the window; additional ones follow
  Lanes lanes, lanes_additional;
  std::uint32_t statistic;       // the same for the statistics of its first column, and how far that of the second and
  std::uint32_t next_statistic;  // those of the next group are
  std::uint32_t next_group;
  bool has_rows;
};

/// The tables of a CTA in shared memory.
struct Tables {
  int2* places;
  std::uint32_t* offsets;
  const std::uint8_t* masks;
  const int* row_tokens;
  char* stages;
  int columns;  // of the box
  int passes;   // in which all threads copy them, each a chunk of a column
};

/// Of a power of two, in base 2.
CUTE_DEVICE int logarithm(int power) {
  return 31 - __clz(power);
}

/// A lane's bits of a pair of groups: `is_hidden(group, element)` for the four elements of the first, then those of the
/// second, highest bit first.
template <class IsHidden>
CUTE_DEVICE std::uint8_t hidden_bits(const IsHidden& is_hidden) {
  std::uint32_t bits = 0;
  CUTE_UNROLL
  for (int i = 0; i < 8; ++i) bits |= is_hidden(i / 4, i % 4) ? 0x80u >> i : 0u;
  return static_cast<std::uint8_t>(bits);
}

/// Fills the tables; false where the region has no rows. All threads have to call it, and to meet before they use the
/// tables; a lane's own warp has to meet before it uses its part.
template <int kHeadDim, bool kRowsAreKeys>
CUTE_DEVICE bool make_plan(const CommonParams& p, char* raw, Tables& tables, TilePlan& tile) {
  constexpr int kColumnBytes = 4 * kHeadDim;
  const Region& region = p.region;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  tables.places = reinterpret_cast<int2*>(raw + region.shared.places);
  tables.offsets = reinterpret_cast<std::uint32_t*>(raw + region.shared.offsets) + warp * region.pairs;
  std::uint8_t* masks = reinterpret_cast<std::uint8_t*>(raw + region.shared.masks) + warp * region.pairs * 32 + lane;
  int* row_tokens = reinterpret_cast<int*>(raw + region.shared.row_tokens) + warp * kRows;
  tables.masks = masks;
  tables.row_tokens = row_tokens;
  tables.stages = raw + region.shared.stages;

  // The columns of the region: where they begin, how many there are, and how far they are apart.
  int extent[kRank], first_token = 0, token_pitch[kRank];
  // The columns of the tile, in the region's; and for the lane's two rows, in the tile's.
  int tile_begin[kRank], groups[kRank], window_begin[2][kRank], window_end[2][kRank];
  int row_token = 0, row_shift = 0, id = blockIdx.x, tile_id = warp;
  bool has_row = true, is_row[2] = {true, true};
  tile.has_rows = true;
  CUTE_UNROLL
  for (int d = 0; d < kRank; ++d) {
    const DeviceAxis& axis = p.axis[d];
    const int of_dimension = axis.dilation * region.regions[d], here = id % of_dimension,
              most = region.tile[d] * region.tiles[d];
    id /= of_dimension;
    const int residue = here % axis.dilation, number = region.dimension[d];
    const RegionAxis<kRowsAreKeys> rows(axis, residue, here / axis.dilation * most, most,
                                        Origin::load(p.origins, number, axis.dilation),
                                        Origin::load(p.origins, kRank + number, axis.dilation));
    if (rows.count <= 0) return false;
    token_pitch[d] = (kRowsAreKeys ? p.query_pitch : p.kv_pitch)[d];
    const int row_pitch = (kRowsAreKeys ? p.kv_pitch : p.query_pitch)[d];
    const int begin = tile_id % region.tiles[d] * region.tile[d], end = min(begin + region.tile[d], rows.count);
    tile_id /= region.tiles[d];
    tile.has_rows &= begin < end;
    // A lane looks at a row of the tile, three at the last one of the tile and the ends of the region.
    const int looked_at = lane < kRows ? min(begin + lane, end - 1)
                          : lane == 16 ? end - 1
                          : lane == 17 ? 0
                                       : rows.count - 1;
    const int2 seen = rows.seen(axis, looked_at);
    const auto begin_of = [&](int of_lane) { return __shfl_sync(0xffffffffu, seen.x, of_lane); };
    const auto end_of = [&](int of_lane) { return __shfl_sync(0xffffffffu, seen.y, of_lane); };
    const int first = begin_of(17), first_of_tile = begin_of(0);
    extent[d] = max(end_of(18) - first, 0);
    first_token += (rows.columns().residue + first * axis.dilation) * token_pitch[d];
    token_pitch[d] *= axis.dilation;
    tile_begin[d] = first_of_tile - first;
    groups[d] = (max(end_of(16) - first_of_tile, 0) + region.group[d] - 1) / region.group[d];
    // Extents that divide 16 are powers of two.
    const auto place_of = [&](int row) { return row >> row_shift & (region.tile[d] - 1); };
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int place = place_of(lane / 4 + 8 * r);
      is_row[r] &= begin + place < end && rows.is_inside(begin + place);
      window_begin[r][d] = begin_of(place) - first_of_tile;
      window_end[r][d] = end_of(place) - first_of_tile;
    }
    const int row = begin + place_of(lane % kRows);
    row_shift += logarithm(region.tile[d]);
    has_row &= row < end;
    row_token += (rows.rows().residue + (rows.begin + row) * axis.dilation) * row_pitch;
  }
  if (lane < kRows) row_tokens[lane] = has_row ? row_token : -1;

  const int wide = region.group[0], high = region.group[1], wide_shift = logarithm(wide), shift = logarithm(high);
  const auto swizzle = [&](int x, int y) { return (x & (wide - 1)) | (y & (high - 1)) * wide; };
  tables.columns = extent[0] * extent[1] * extent[2];
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

  const int pair_rows = high * region.pitch[1], in_group = lane & (kColumns - 1);
  const int x = in_group & (wide - 1), y = in_group >> wide_shift;
  const auto lane_of = [&](int group, int chunk) {
    return static_cast<std::uint32_t>((x + y * region.pitch[1] + group * pair_rows) * kColumnBytes |
                                      (chunk ^ swizzle(x + tile_begin[0], y + tile_begin[1])) << 4);
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
  tile.statistic = region.shared.statistics + 8 * ((column & (wide - 1)) + (column >> wide_shift) * region.pitch[1]);
  tile.next_statistic = 8 * (wide > 1 ? 1 : region.pitch[1]);
  tile.next_group = 8 * pair_rows;

  const int line_pairs = (groups[1] + 1) / 2;
  tile.pairs = tile.has_rows ? groups[0] * groups[2] * line_pairs : 0;
  int written = 0;
  if (tile.pairs > 0) {
    const int base = tile_begin[0] + tile_begin[1] * region.pitch[1] + tile_begin[2] * region.pitch[2];
    for (int gz = 0; gz < groups[2]; ++gz) {
      for (int gx = 0; gx < groups[0]; ++gx) {
        const int line = base + gx * wide + gz * region.pitch[2];
        for (int i = lane; i < line_pairs; i += 32) {
          tables.offsets[written + i] = (line + 2 * i * pair_rows) * kColumnBytes;
        }
        written += line_pairs;
        int begin[4], end[4];
        CUTE_UNROLL
        for (int e = 0; e < 4; ++e) {
          const int r = e / 2, at = column + e % 2, ex = gx * wide + (at & (wide - 1)), ey = at >> wide_shift;
          const bool is_seen = is_row[r] && ex >= window_begin[r][0] && ex < window_end[r][0] &&
                               gz >= window_begin[r][2] && gz < window_end[r][2];
          begin[e] = (window_begin[r][1] - ey + high - 1) >> shift;
          end[e] = is_seen ? (window_end[r][1] - ey + high - 1) >> shift : 0;
        }
        for (int i = 0; i < line_pairs; ++i, masks += 32) {
          *masks = hidden_bits([&](int group, int e) { return 2 * i + group < begin[e] || 2 * i + group >= end[e]; });
        }
      }
    }
  }
  const int additional_pairs = (p.additional_kv + 15) / 16;
  for (int i = lane; i < additional_pairs; i += 32) {
    tables.offsets[written + i] = i * 16 * kColumnBytes;
  }
  for (int i = 0; i < additional_pairs; ++i, masks += 32) {
    *masks = hidden_bits([&](int group, int e) {
      return !is_row[e / 2] || (2 * i + group) * kColumns + column + e % 2 >= p.additional_kv;
    });
  }
  __syncwarp();
  return true;
}

}  // namespace natten_jax::small
