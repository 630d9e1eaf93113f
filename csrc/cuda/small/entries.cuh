// Grouping of a CTA's batch entries if they have separate layouts. The entries of a group share a plan.
#pragma once

#include "cuda/small/copies.cuh"

namespace natten_jax::small {

/// Layouts and groups of a CTA's batch entries, kept in shared memory. A single warp loads and computes them before the
/// first plan, with one entry per lane.
///
/// Entries with rows in the region form groups that share a plan. The items of each group are split into pieces of at
/// most Region::items_of_cta items.
struct EntryState {
  /// The group of a lane's entry. Groups are ordered by their first entries.
  struct Group {
    int pieces_end;    // number of pieces in all groups whose first entry is the lane's entry or an earlier one
    int first_item;    // number of items in all earlier groups; valid for a group's first entry
    int items;         // number of items in the group
    int piece_items;   // maximum number of items in a piece
    int is_alike;      // the group's plan is the plan of the launch's layout
    unsigned entries;  // bit mask of the group's entries
  };
  Group group[kEntriesOfCta];
  EntryLayout::Cache layout[kEntriesOfCta];
  std::uint8_t order[kEntriesOfCta];  // entries sorted by group
};
static_assert(sizeof(EntryState) <= kEntryStateBytes);

/// A dimension of a region in a batch entry's layout. The code is kept short, because all warps of a CTA wait for the
/// warp that runs it.
template <bool kRowsAreKeys>
struct EntryRegion {
  bool has_rows;  // the region contains rows of the entry
  bool is_alike;  // the plan for the launch's layout can be used: the entry's layout equals the launch's
                  // layout, or ends far after the region
  int origin, query_extent, kv_extent;  // clamped to the launch's layout; the extents are -1 if is_alike

  /// `residue` is the region's dilation group, and `first_row` the region's first row in that group. The region has at
  /// most `rows` rows, which see a box of `columns` columns.
  CUTE_DEVICE EntryRegion(const DeviceAxis& axis, int residue, int first_row, int rows, int columns, int given_origin,
                          int queries, int keys) {
    const int begin = residue + first_row * axis.dilation;
    origin = min(max(given_origin, 0), max(axis.query_extent - axis.query_local_extent, 0));
    query_extent = min(queries, axis.query_extent);
    kv_extent = min(keys, axis.kv_extent);
    has_rows = begin < (kRowsAreKeys ? min(kv_extent, axis.kv_local_extent) : query_extent - origin);
    const int behind = begin + rows_behind(axis, first_row, rows, columns) * axis.dilation;
    const bool is_far = axis.ends != Ends::kWrap && min(query_extent, kv_extent) >= behind;
    const bool is_same = query_extent == axis.query_extent && kv_extent == axis.kv_extent &&
                         kv_extent >= axis.kernel_size * axis.dilation;
    is_alike = origin == 0 && (is_far || is_same);
    if (is_alike) query_extent = kv_extent = -1;
  }

 private:
  /// Returns a distance in rows from the region's first row. If a layout ends at this distance or later, the region's
  /// plan does not depend on where it ends, because the end lies past the region's box and past the columns that its
  /// rows see.
  ///
  /// If the layout ends before this distance, the plan depends on the end for two reasons. Windows are shifted near the
  /// end, so that more queries see a key. With keys as rows, the last two regions also divide their tiles differently
  /// (RegionAxis::fill_last_region).
  CUTE_DEVICE static int rows_behind(const DeviceAxis& axis, int first_row, int rows, int columns) {
    // Lower bound of the number of columns that the box has before the region's first row.
    const int before = kRowsAreKeys && axis.is_causal() ? 0 : min(first_row, (axis.kernel_size - 1) / 2);
    const int visible = kRowsAreKeys ? rows + max(axis.kernel_size, rows) : rows + (axis.kernel_size + 1) / 2;
    return max(visible, columns - before) + 2 * (axis.stride - 1);
  }
};

/// Loads the layouts of a CTA's entries with one warp. Neighboring lanes load neighboring numbers. When each lane
/// loaded the numbers of one entry instead, hundreds of CTAs queued for the few L2 lines that all of them read.
CUTE_DEVICE void load_layouts(const CommonParams& p, int first_entry, int entries, EntryState& state) {
  constexpr int kNumbers = kRank * kRank;
  static_assert(kEntriesOfCta == 32);
  const int lane = threadIdx.x % 32;
  const std::int32_t* const layouts = p.layouts + first_entry * kNumbers;
  int loaded[kNumbers];
  CUTE_UNROLL
  for (int i = 0; i < kNumbers; ++i) {
    if (lane + 32 * i < entries * kNumbers) loaded[i] = load_written(layouts + lane + 32 * i);
  }
  CUTE_UNROLL
  for (int i = 0; i < kNumbers; ++i) {
    const int number = lane + 32 * i;
    if (number < entries * kNumbers) state.layout[number / kNumbers].numbers[number % kNumbers] = loaded[i];
  }
  state.layout[lane].entry = first_entry + lane;
  __syncwarp();
}

/// Groups the entries that share a plan, with one warp.
template <bool kRowsAreKeys>
CUTE_DEVICE void group_entries(const CommonParams& p, int first_entry, EntryState& state) {
  constexpr unsigned kAll = 0xffffffffu;
  const int lane = threadIdx.x % 32, entries = min(p.entries_of_cta, p.batch - first_entry);
  load_layouts(p, first_entry, entries, state);
  const int (&numbers)[kRank * kRank] = state.layout[min(lane, entries - 1)].numbers;
  bool has_rows = lane < entries, is_alike = true;
  unsigned like = kAll;  // bit mask of the entries that can share the plan of the lane's entry
  int id = blockIdx.x;
  CUTE_UNROLL
  for (int d = 0; d < kRank; ++d) {
    const DeviceAxis& axis = p.axis[d];
    int residue, number;
    axis.by_dilation(id, residue, id);
    p.by_regions[d](id, number, id);
    const int rows = p.region.tile[d] * p.region.tiles[d], dimension = p.region.dimension[d];
    const EntryRegion<kRowsAreKeys> region(axis, residue, number * rows, rows, p.region.extent[d], numbers[dimension],
                                           numbers[kRank + dimension], numbers[2 * kRank + dimension]);
    has_rows = has_rows && region.has_rows;
    is_alike = is_alike && region.is_alike;
    if (__all_sync(kAll, region.is_alike || !region.has_rows)) continue;
    like &= __match_any_sync(kAll, region.origin) & __match_any_sync(kAll, region.query_extent) &
            __match_any_sync(kAll, region.kv_extent);
  }
  like &= __ballot_sync(kAll, has_rows);
  const unsigned before = (1u << lane) - 1;
  const bool is_first = has_rows && (like & before) == 0;
  // The low 6 bits count entries, and the higher bits count pieces, so that one prefix sum computes both counts.
  constexpr int kEntryBits = 6;
  static_assert(kEntriesOfCta < 1 << kEntryBits);
  const int items = __popc(like) * p.heads, pieces = p.by_items.divide(items + p.region.items_of_cta - 1);
  // The pieces of a group have equal sizes, except the last one, which may be smaller. In a kernel that owns keys, a
  // piece includes all query heads that share a key/value head, because their gradients are added up.
  const int together = kRowsAreKeys ? p.by_heads_per_kv.divisor : 1,
            piece_items = (items / together + pieces - 1) / max(pieces, 1) * together;
  const int counts = is_first ? pieces << kEntryBits | __popc(like) : 0;
  int sum = counts;
  CUTE_UNROLL
  for (int distance = 1; distance < 32; distance *= 2) {
    const int lower_sum = __shfl_up_sync(kAll, sum, distance);
    if (lane >= distance) sum += lower_sum;
  }
  const int entries_before = (sum - counts) & ((1 << kEntryBits) - 1);
  state.group[lane] = {sum >> kEntryBits, entries_before * p.heads, items, piece_items, is_alike, like};
  const int group_begin = __shfl_sync(kAll, entries_before, max(__ffs(static_cast<int>(like)) - 1, 0));
  if (has_rows) state.order[group_begin + __popc(like & before)] = static_cast<std::uint8_t>(lane);
}

/// Sets `items` to the items of piece `number`, and `layout` to the layout of their plan. Returns false if the piece
/// does not exist.
CUTE_DEVICE bool take_piece(const CommonParams& p, EntryState& state, int first_entry, int number, EntryItems& items,
                            EntryLayout& layout) {
  const unsigned groups = __ballot_sync(0xffffffffu, number < state.group[threadIdx.x % 32].pieces_end);
  if (groups == 0) return false;
  const int first = __ffs(static_cast<int>(groups)) - 1;
  const EntryState::Group group = state.group[first];
  const int begin = (number - (first > 0 ? state.group[first - 1].pieces_end : 0)) * group.piece_items;
  items.first = group.first_item + begin;
  items.count = min(group.piece_items, group.items - begin);
  items.first_entry = first_entry;
  items.order = state.order;
  items.entries = group.entries;
  items.maps = p.region.has_boxes && !group.is_alike ? first_entry + first : -1;
  layout = group.is_alike ? EntryLayout() : EntryLayout(p.layouts, first_entry + first, state.layout[first]);
  return true;
}

}  // namespace natten_jax::small
