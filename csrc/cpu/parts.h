// Batch entries of a pass, grouped if their layouts are equal.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cpu/plan.h"

namespace natten_jax::cpu {

/// A pass over batch entries with equal layouts.
struct Part {
  Plan plan;
  std::int64_t first_entry;
  std::int64_t first_item;

  /// A work item, by its number within the part.
  Item item(std::int64_t index) const;
};

/// A part for all entries, or a part per entry if they have separate layouts.
std::vector<Part> parts_of(const Problem& problem, const TileShapes& tiles, const Arrays& arrays, Pass pass);

/// Bytes of scratch memory that suffice for an item of every part.
std::size_t scratch_bytes(const std::vector<Part>& parts);

}  // namespace natten_jax::cpu
