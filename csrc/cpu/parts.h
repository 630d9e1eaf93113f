// The batch entries of a pass, together where they are alike.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cpu/plan.h"

namespace natten_jax::cpu {

/// A pass over entries of the batch that are alike.
struct Part {
  Plan plan;
  std::int64_t first_entry;
  std::int64_t first_item;

  /// A work item, by its number among those of the part.
  Item item(std::int64_t index) const;
};

/// All entries in one part; or one each, where they have layouts of their own.
std::vector<Part> parts_of(const Problem& problem, const TileShapes& tiles, const Arrays& arrays, Pass pass);

/// Scratch memory that an item of any of the parts takes.
std::size_t scratch_bytes(const std::vector<Part>& parts);

}  // namespace natten_jax::cpu
