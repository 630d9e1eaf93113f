// Conversion of a relative bias to the tables that kernels read. The caller's array has one number per offset. In the
// tables, each bias is a term that is added to an unscaled product of a query and a key, and lines (the offsets along
// the last dimension) are padded (bias_lines.h).
#pragma once

#include <cutlass/fast_math.h>

#include <cstdint>

#include "natten_jax/added_logit.h"
#include "natten_jax/problem.h"

namespace natten_jax::small {

struct GivenTable {
  const float* tables;          // [1 or batch, heads, offsets]
  bool is_per_entry;            // each batch entry has a separate table
  int offsets;                  // per table
  int offsets_of_line;          // offsets along the last dimension
  cutlass::FastDivmod by_line;  // divides by the entries of a line of a kernel's table, with padding

  /// Returns the caller's table of a head and batch entry; `number` is entry * heads + head.
  NATTEN_JAX_HOST_DEVICE const float* head_table(std::int64_t number, int head) const {
    return tables + (is_per_entry ? number : head) * offsets;
  }

  /// Returns the index in the caller's table of entry `entry` of a kernel's table; negative for padding.
  NATTEN_JAX_HOST_DEVICE int offset_of(int entry) const {
    int line, index;
    by_line(line, index, entry);
    const int offset = line * offsets_of_line + index;
    return index < offsets_of_line && offset < offsets ? offset : -1;
  }

  /// Converts a bias to a term that is added to unscaled products.
  NATTEN_JAX_HOST_DEVICE static float product_of(float bias, float scale) {
    return added_product(bias, clipped_logit(bias / scale));
  }
};

}  // namespace natten_jax::small
