// A relative bias as a call gives it, a number for each offset, and as kernels read it: in products of queries and
// keys, and with lines that are filled up (bias_lines.h).
#pragma once

#include <cutlass/fast_math.h>

#include <cstdint>

#include "natten_jax/added_logit.h"
#include "natten_jax/problem.h"

namespace natten_jax::small {

struct GivenTable {
  const float* tables;          // [1 or batch, heads, offsets]
  bool is_of_entry;             // batch entries have tables of their own
  int offsets;                  // of a table
  int offsets_of_line;          // offsets along the last dimension
  cutlass::FastDivmod by_line;  // entries of a line, as kernels read it

  /// The table of a batch entry's head, which is that number among all.
  NATTEN_JAX_HOST_DEVICE const float* of(std::int64_t number, int head) const {
    return tables + (is_of_entry ? number : head) * offsets;
  }

  /// Which offset an entry of a table is for, as kernels read it; negative where it fills up a line, or the table.
  NATTEN_JAX_HOST_DEVICE int offset_of(int entry) const {
    int line, place;
    by_line(line, place, entry);
    const int offset = line * offsets_of_line + place;
    return place < offsets_of_line && offset < offsets ? offset : -1;
  }

  /// A bias as a term of products, which kernels scale.
  NATTEN_JAX_HOST_DEVICE static float product_of(float bias, float scale) {
    return added_product(bias, clipped_logit(bias / scale));
  }
};

}  // namespace natten_jax::small
