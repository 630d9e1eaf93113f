// The batch entries of a CTA, where these have layouts of their own: which of them share a plan.
#pragma once

#include "cuda/small/copies.cuh"

namespace natten_jax::small {

/// Batch entries whose layout ends far enough behind a region have a plan in common: that of all, for which boxes may
/// be loaded by the tensor maps of all, too. Those whose layout ends next to the region have plans of their own.
///
/// A lane of each warp stands for an entry. Nothing of it is kept beside a plan: there are no registers for that.
template <bool kRowsAreKeys>
class EntryPlans {
 public:
  /// The items of a CTA's plan of this number, and the layout that it is for; false where there is none.
  CUTE_DEVICE static bool take(const CommonParams& p, int number, EntryItems& items, EntryLayout& layout) {
    const EntryPlans all(p);
    items = all.items_;
    items.entries = all.alike_;
    items.have_maps = false;
    layout = {};
    const int own = number - (all.alike_ != 0);
    if (own >= 0) {
      if (own >= __popc(all.single_)) return false;
      const int entry = __fns(all.single_, 0, own + 1);
      items.entries = 1u << entry;
      items.have_maps = p.region.has_boxes;
      layout = EntryLayout(p.layouts, all.first_entry_ + entry);
    }
    items.count = __popc(items.entries) * items.heads;
    return true;
  }

 private:
  CUTE_DEVICE explicit EntryPlans(const CommonParams& p) {
    int group, cta;
    p.by_ctas_of_entry(group, cta, blockIdx.y);
    const int first_head = cta * p.region.items_of_cta;
    first_entry_ = group * p.entries_of_cta;
    items_.first = first_entry_ * p.heads + first_head;
    items_.heads = min(p.entries_of_cta > 1 ? p.heads : p.region.items_of_cta, p.heads - first_head);
    look_at(p, min(p.entries_of_cta, p.batch - first_entry_));
  }

  /// Finds out what the region is of each entry.
  CUTE_DEVICE void look_at(const CommonParams& p, int entries) {
    const int lane = threadIdx.x % 32;
    // By way of the first-level cache: all warps of all CTAs read the same.
    const std::int32_t* const layout = p.layouts + (first_entry_ + min(lane, entries - 1)) * (kRank * kRank);
    bool is_alike = true, has_rows = lane < entries;
    int id = blockIdx.x;
    CUTE_UNROLL
    for (int d = 0; d < kRank; ++d) {
      const DeviceAxis& axis = p.axis[d];
      const std::int32_t* const of_axis = layout + p.region.dimension[d];
      int residue, number;
      axis.by_dilation(id, residue, id);
      p.by_regions[d](id, number, id);
      const int most = p.region.tile[d] * p.region.tiles[d], begin = number * most;
      const int origin = of_axis[0];
      const RegionAxis<kRowsAreKeys> of_all(axis, EntryAxis(axis, Origin{}, Origin{}), residue, begin, most);
      const RegionAxis<kRowsAreKeys> own(axis, EntryAxis(axis, origin, of_axis[kRank], of_axis[2 * kRank]), residue,
                                         begin, most);
      has_rows = has_rows && own.count > 0;
      // Behind what any of the rows sees or is seen by, and behind its box.
      const int behind = begin + max(most + axis.kernel_size, p.region.extent[d]) + 2 * axis.stride;
      const bool is_far = own.query.length >= behind && own.kv.length >= behind;
      const bool is_same = own.query.length == of_all.query.length && own.kv.length == of_all.kv.length &&
                           own.query.local_length == of_all.query.local_length &&
                           own.kv.local_length == of_all.kv.local_length;
      is_alike = is_alike && origin == 0 && own.kernel_size == axis.kernel_size && own.stride == axis.stride &&
                 (is_far || is_same);
    }
    alike_ = __ballot_sync(0xffffffffu, has_rows && is_alike);
    single_ = __ballot_sync(0xffffffffu, has_rows && !is_alike);
  }

  int first_entry_;
  EntryItems items_;              // of that entry
  std::uint32_t alike_, single_;  // entries that have a plan in common, and those that have their own
};

/// Calls `call(items, layout, is_first)` for each plan of a CTA: one, unless batch entries have layouts of their own.
template <class Items, bool kRowsAreKeys, class Call>
CUTE_DEVICE void for_plans(const CommonParams& p, const Call& call) {
  if constexpr (Items::kOfEntries) {
    Items items;
    EntryLayout layout;
    for (int number = 0; EntryPlans<kRowsAreKeys>::take(p, number, items, layout); ++number) {
      if (number > 0) __syncthreads();  // the tables and stages of the plan before have been used
      call(items, layout, number == 0);
    }
    // What follows the kernel may not start before the one that it overlaps with is done, even if nobody waited for it.
    if (blockIdx.x == 0 && blockIdx.y == 0) wait_for_previous_kernel();
  } else {
    call(Items(p), EntryLayout{}, true);
  }
}

}  // namespace natten_jax::small
