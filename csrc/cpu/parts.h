// Division of a pass into parts. If no batch entry has a separate layout, there is one part. Otherwise, each batch
// entry is a part.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cpu/plan.h"

namespace natten_jax::cpu {

/// Plan of a pass for some of the batch entries.
struct Part {
  Plan plan;
  std::int64_t first_entry;
  std::int64_t first_item;

  /// Work item of the pass, given its index within the part.
  Item item(std::int64_t index) const;
};

/// Divides a pass into parts.
std::vector<Part> parts_of(const Problem& problem, const TileShapes& tiles, const Arrays& arrays, Pass pass);

/// Maximum size, in bytes, of the scratch memory of an item, over all parts.
std::size_t scratch_bytes(const std::vector<Part>& parts);

}  // namespace natten_jax::cpu
