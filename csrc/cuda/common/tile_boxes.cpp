#include "cuda/common/tile_boxes.h"

#include "cuda/common/seam_boxes.h"

namespace natten_jax {

TileBoxes boxes_of_tiles(const Problem& problem, const std::int64_t (&tile)[kRank],
                         const std::int64_t (&outer)[kRank]) {
  TileBoxes result{};
  result.has_seams = wraps(problem);
  const SeamBoxes boxes = choose_seam_boxes(problem, tile, outer);
  const auto& box = boxes.extent;
  result.tokens = static_cast<int>(box[0] * box[1] * box[2]);
  for (int d = 0; d < kRank; ++d) result.extent[d] = static_cast<int>(box[d]);
  for (std::int64_t x = 0; x < tile[0]; x += box[0]) {
    for (std::int64_t y = 0; y < tile[1]; y += box[1]) {
      for (std::int64_t z = 0; z < tile[2] && result.count < kMostBoxes; z += box[2]) {
        const auto narrow = [](std::int64_t value) { return static_cast<unsigned char>(value); };
        result.begin[result.count++] = make_uchar4(narrow(x), narrow(y), narrow(z), 0);
      }
    }
  }
  return result;
}

}  // namespace natten_jax
