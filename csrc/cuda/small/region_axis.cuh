// A dimension of a CTA's region: its rows, and the columns that each row sees. Rows are queries or keys; if they are
// keys, the columns are the queries that see them.
#pragma once

#include "cuda/common/axis_plan.cuh"
#include "cuda/small/params.h"

namespace natten_jax::small {

/// Rows of a region along a dimension. `begin` is the index of the first row. `most` is the maximum number of rows;
/// without per-entry layouts, only the last region has fewer rows. `tile` is the number of rows of a tile, a power of
/// two.
struct RegionRows {
  int begin, most, tile;
};

/// A dimension of a region. If the dimension wraps, which requires `kMayWrap`, column indices continue past both ends
/// of the layout.
template <bool kRowsAreKeys, bool kMayWrap = false>
struct RegionAxis {
  GroupTokens query, kv;
  int begin;  // index of the region's first row
  int count;  // number of rows; the region is empty if not positive
  int kernel_size, stride;

  CUTE_DEVICE RegionAxis(const DeviceAxis& axis, const EntryAxis& entry, int residue, RegionRows region)
      : query(GroupTokens::for_queries(axis, entry, group_in(axis, entry, residue))),
        kv(GroupTokens::for_keys(axis, entry, group_in(axis, entry, residue))),
        begin(region.begin),
        count(min(region.most, rows().local_length - begin)),
        kernel_size(entry.kernel_size),
        stride(entry.stride) {}

  /// Constructs a dimension of a plain problem.
  CUTE_DEVICE RegionAxis(const DeviceAxis& axis, int residue, RegionRows region)
      : begin(region.begin), kernel_size(axis.kernel_size), stride(axis.stride) {
    const int length = group_length(axis, axis.query_extent, residue);
    query = kv = {residue, 0, length, length};
    count = min(region.most, length - begin);
  }

  /// Returns the dimension of a region in a batch entry's layout. With `kIsPlain`, returns the dimension for a plain
  /// problem.
  template <bool kIsPlain>
  CUTE_DEVICE static RegionAxis for_layout(const CommonParams& p, const EntryLayout& layout, int d, int residue,
                                           RegionRows region) {
    const DeviceAxis& axis = p.axis[d];
    if constexpr (kIsPlain) return RegionAxis(axis, residue, region);
    if ((p.is_plain && !layout.is_separate()) || wraps(axis)) return RegionAxis(axis, residue, region);
    const int dimension = p.region.dimension[d];
    if (layout.is_separate()) {
      RegionAxis result(axis, EntryAxis(axis, layout, dimension), residue, region);
      if constexpr (kRowsAreKeys) result.fill_last_region(region);
      return result;
    }
    // Clamp the origins, so that sums of coordinates do not overflow. Valid origins are inside these limits.
    const auto origin = [&](int index, int least, int largest) {
      return p.origins == nullptr
                 ? Origin{0, 0}
                 : Origin::split(min(max(load_written(p.origins + index), least), largest), axis.dilation);
    };
    const EntryAxis entry(axis, origin(dimension, 0, max(axis.query_extent - axis.query_local_extent, 0)),
                          origin(kRank + dimension, -axis.kv_local_extent, axis.kv_extent));
    return RegionAxis(axis, entry, residue, region);
  }

  /// True if the dimension wraps; all of its tokens are then local.
  CUTE_DEVICE static bool wraps(const DeviceAxis& axis) { return kMayWrap && axis.ends == Ends::kWrap; }

  CUTE_DEVICE const GroupTokens& rows() const { return kRowsAreKeys ? kv : query; }
  CUTE_DEVICE const GroupTokens& columns() const { return kRowsAreKeys ? query : kv; }

  /// Returns the range of local columns that a row of the region sees. Neither end of the range decreases from one row
  /// to the next, because a key outside of the layout gets the range of the nearest key inside.
  CUTE_DEVICE int2 visible_range(const DeviceAxis& axis, int row) const {
    row += begin;
    const EntryWindows windows(axis, kernel_size, stride);
    Range<int> window;
    if constexpr (kRowsAreKeys) {
      const int index = min(max(row, -kv.shift), kv.length - 1 - kv.shift) + kv.shift;
      window = inverse_window_bounds(windows, index, query.length, kv.length);
    } else {
      window = window_bounds(windows, row + query.shift, kv.length);
    }
    if (wraps(axis)) return make_int2(window.begin, window.end);
    const int shift = columns().shift;
    return make_int2(max(window.begin - shift, 0), min(max(window.end - shift, 0), columns().local_length));
  }

  /// Returns the offset of a key from a query along the dimension, relative to the smallest offset of a window. If rows
  /// are queries, `row` is the query and `column` is the key; if rows are keys, it is the reverse.
  CUTE_DEVICE int offset(const DeviceAxis& axis, int row, int column) const {
    row += begin;
    column += columns().shift;
    if constexpr (kRowsAreKeys) row = min(max(row, -kv.shift), kv.length - 1 - kv.shift);
    row += rows().shift;
    return (kRowsAreKeys ? row - column : column - row) + axis.kernel_size - 1;
  }

  /// True if a row's token lies in the global layout, which is always true for queries.
  CUTE_DEVICE bool is_inside(int row) const {
    return !kRowsAreKeys || (row + begin >= -kv.shift && row + begin < kv.length - kv.shift);
  }

 private:
  /// Gives the last region the maximum number of tiles, and the region before it the remaining tiles. At the end of a
  /// layout, windows of queries are shifted, so that more queries see the keys shortly before the end. If one region
  /// has all of these keys, the boxes of the other regions need no space for more queries. `Side::visible_columns` in
  /// region_side.h relies on this.
  CUTE_DEVICE void fill_last_region(RegionRows region) {
    const int length = kv.local_length, end = region.begin + region.most;
    if (length <= region.begin || length > end + region.most) return;
    const int first_of_last = max(((length + region.tile - 1) & -region.tile) - region.most, 0);
    if (length <= end) {
      begin = first_of_last;
      count = length - first_of_last;
    } else {
      count = first_of_last - begin;
    }
  }

  CUTE_DEVICE static int group_in(const DeviceAxis& axis, const EntryAxis& entry, int residue) {
    return group_of(axis, residue, kRowsAreKeys ? entry.kv_origin : entry.query_origin);
  }
};

}  // namespace natten_jax::small
