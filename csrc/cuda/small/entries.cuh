// The batch entries of a CTA, where these have layouts of their own: which of them share a plan.
#pragma once

#include "cuda/small/copies.cuh"

namespace natten_jax::small {

/// What a CTA finds out about its batch entries before all else, in shared memory; a lane of a warp stands for each.
///
/// Entries with rows in the region form groups that have a plan in common, and groups are cut into pieces of as many
/// items as a CTA takes at a time.
struct EntryState {
  /// What is known of a lane's entry and those before it, in the order of their groups' first entries.
  struct Group {
    int pieces_end;  // pieces of the groups that begin with these
    int first_item;  // items of groups that begin with an entry before
    int items;       // of the entry's group
    int is_alike;    // whether the group's plan is that of the launch's layout
  };
  Group group[kEntriesOfCta];
  EntryLayout::Kept layout[kEntriesOfCta];
  std::uint8_t order[kEntriesOfCta];  // entries by their groups
};
static_assert(sizeof(EntryState) <= kEntryStateBytes);

/// One dimension of a region and an entry: whether the region has rows there, and whether its plan is that of the
/// launch's layout, as wherever the entry's ends far enough behind the region, or where that does.
template <bool kRowsAreKeys>
struct EntryRegion {
  bool has_rows, is_alike;
  int origin, query_extent, kv_extent;  // as far as plans depend on them

  CUTE_DEVICE EntryRegion(const DeviceAxis& axis, const EntryAxis& entry, int residue, int begin, int rows,
                          int columns) {
    const int row_tokens = kRowsAreKeys ? entry.kv_local_extent : entry.query_local_extent;
    has_rows = residue + begin * axis.dilation < row_tokens;
    // Behind what any of the rows sees or is seen by, and behind its box.
    const int behind = begin + max(rows + axis.kernel_size, columns) + 2 * axis.stride;
    const bool is_far = axis.ends != Ends::kWrap && axis.dilations(min(entry.query_extent, entry.kv_extent)) >= behind;
    const bool is_same = entry.query_extent == axis.query_extent && entry.kv_extent == axis.kv_extent &&
                         entry.kernel_size == axis.kernel_size && entry.stride == axis.stride;
    origin = entry.query_origin.index * axis.dilation + entry.query_origin.group;
    is_alike = origin == 0 && (is_far || is_same);
    query_extent = is_alike ? -1 : entry.query_extent;
    kv_extent = is_alike ? -1 : entry.kv_extent;
  }
};

/// Finds out which entries have which plan: one warp.
template <bool kRowsAreKeys>
CUTE_DEVICE void group_entries(const CommonParams& p, int first_entry, EntryState& state) {
  constexpr unsigned kAll = 0xffffffffu;
  const int lane = threadIdx.x % 32, entries = min(p.entries_of_cta, p.batch - first_entry);
  const std::int32_t* const layout = p.layouts + (first_entry + min(lane, entries - 1)) * (kRank * kRank);
  int numbers[kRank * kRank];
  CUTE_UNROLL
  for (int i = 0; i < kRank * kRank; ++i) numbers[i] = load_written(layout + i);
  bool has_rows = lane < entries, is_alike = true;
  unsigned like = kAll;  // entries with the same plan
  int id = blockIdx.x;
  CUTE_UNROLL
  for (int d = 0; d < kRank; ++d) {
    const DeviceAxis& axis = p.axis[d];
    int residue, number;
    axis.by_dilation(id, residue, id);
    p.by_regions[d](id, number, id);
    const int rows = p.region.tile[d] * p.region.tiles[d];
    // Lanes hold all numbers of their entries: which of them are this dimension's is the same for all.
    const auto of_dimension = [&](int row) {
      const int dimension = p.region.dimension[d];
      return dimension == 0   ? numbers[row * kRank]
             : dimension == 1 ? numbers[row * kRank + 1]
                              : numbers[row * kRank + 2];
    };
    const EntryAxis entry(axis, of_dimension(0), of_dimension(1), of_dimension(2));
    const EntryRegion<kRowsAreKeys> region(axis, entry, residue, number * rows, rows, p.region.extent[d]);
    has_rows = has_rows && region.has_rows;
    is_alike = is_alike && region.is_alike;
    if (__all_sync(kAll, region.is_alike)) continue;
    like &= __match_any_sync(kAll, region.origin) & __match_any_sync(kAll, region.query_extent) &
            __match_any_sync(kAll, region.kv_extent);
  }
  like &= __ballot_sync(kAll, has_rows);
  const unsigned before = (1u << lane) - 1;
  const bool is_first = has_rows && (like & before) == 0;
  // A number of entries has 6 bits. Above them, pieces are added up along with it.
  constexpr int kEntryBits = 6;
  static_assert(kEntriesOfCta < 1 << kEntryBits);
  const int items = __popc(like) * p.heads, pieces = (items + p.region.items_of_cta - 1) / p.region.items_of_cta;
  const int own = is_first ? pieces << kEntryBits | __popc(like) : 0;
  int sum = own;
  CUTE_UNROLL
  for (int distance = 1; distance < 32; distance *= 2) {
    const int of_lane = __shfl_up_sync(kAll, sum, distance);
    if (lane >= distance) sum += of_lane;
  }
  const int entries_before = (sum - own) & ((1 << kEntryBits) - 1);
  state.group[lane] = {sum >> kEntryBits, entries_before * p.heads, items, is_alike};
  const int of_group = __shfl_sync(kAll, entries_before, max(__ffs(static_cast<int>(like)) - 1, 0));
  if (has_rows) state.order[of_group + __popc(like & before)] = static_cast<std::uint8_t>(lane);
  CUTE_UNROLL
  for (int i = 0; i < kRank * kRank; ++i) state.layout[lane].numbers[i] = numbers[i];
  state.layout[lane].entry = first_entry + lane;
}

/// The items of a CTA's piece of this number, and the layout that its plan is for; false where there is none.
CUTE_DEVICE bool take_piece(const CommonParams& p, EntryState& state, int first_entry, int number, EntryItems& items,
                            EntryLayout& layout) {
  const unsigned groups = __ballot_sync(0xffffffffu, number < state.group[threadIdx.x % 32].pieces_end);
  if (groups == 0) return false;
  const int first = __ffs(static_cast<int>(groups)) - 1;
  const EntryState::Group group = state.group[first];
  const int begin = (number - (first > 0 ? state.group[first - 1].pieces_end : 0)) * p.region.items_of_cta;
  items.first = group.first_item + begin;
  items.count = min(p.region.items_of_cta, group.items - begin);
  items.first_entry = first_entry;
  items.order = state.order;
  items.maps = p.region.has_boxes && !group.is_alike ? first_entry + first : -1;
  layout = group.is_alike ? EntryLayout() : EntryLayout(p.layouts, first_entry + first, state.layout[first]);
  return true;
}

/// Calls `call(items, layout, is_first)` for each plan of a CTA: one, unless batch entries have layouts of their own.
template <class Items, bool kRowsAreKeys, class Call>
CUTE_DEVICE void for_plans(const CommonParams& p, char* raw, const Call& call) {
  if constexpr (Items::kOfEntries) {
    EntryState& state = *reinterpret_cast<EntryState*>(raw + p.region.shared.batch_entries);
    int first_entry, piece;
    p.by_pieces(first_entry, piece, blockIdx.y);
    first_entry *= p.entries_of_cta;
    if (threadIdx.x < 32) group_entries<kRowsAreKeys>(p, first_entry, state);
    // The kernel before makes maps. What comes after this one may then start: kernels of keys use such maps, too, and
    // wait for nothing else until they need what queries leave them.
    if constexpr (!kRowsAreKeys) wait_for_previous_kernel();
    allow_next_kernel();
    __syncthreads();
    Items items;
    EntryLayout layout;
    for (bool is_first = true; take_piece(p, state, first_entry, piece, items, layout); is_first = false) {
      if (!is_first) __syncthreads();  // the tables and stages of the plan before have been used
      call(items, layout, is_first);
      piece += p.by_pieces.divisor;
    }
    // What follows the kernel may not start before the one that it overlaps with is done, even if nobody waited for it.
    if (blockIdx.x == 0 && blockIdx.y == 0) wait_for_previous_kernel();
  } else {
    call(Items(p), EntryLayout{}, true);
  }
}

}  // namespace natten_jax::small
