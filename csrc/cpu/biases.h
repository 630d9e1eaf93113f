// Biases that are added to logits, and their gradients. Relative biases come from a table with one entry per offset of
// a key from a query. Key biases have one value per key.
//
// This is kernel code: it is compiled once per instruction set, each time in a separate namespace.
#pragma once

#include <cfloat>

#include "cpu/stream.h"
#include "natten_jax/added_logit.h"
#include "natten_jax/logsumexp.h"

namespace natten_jax::cpu::NATTEN_JAX_ISA {
namespace {

/// An array from which each lane reads one element.
struct LaneTable {
  const float* values;
  const std::int32_t* indices;  ///< Index of each lane's element at offset zero.
  std::int32_t last;            ///< Last valid index of `values`.

  /// Elements at the lanes' indices plus `offset`. For a pair of tokens outside every window, the index may lie outside
  /// the array. It is then clamped, and the caller does not use the element.
  NATTEN_JAX_INLINE Float at(std::int32_t offset) const {
    alignas(64) float found[kLanes];
    NATTEN_JAX_UNROLL
    for (int lane = 0; lane < kLanes; ++lane) found[lane] = values[index(lane, offset)];
    return load(found);
  }

  NATTEN_JAX_INLINE std::int32_t index(int lane, std::int32_t offset) const {
    const std::int32_t unclamped = indices[lane] + offset;
    return unclamped < 0 ? 0 : (unclamped > last ? last : unclamped);
  }
};

/// Calls visit(row number, index) for every row of a box, in the order of for_each_masked_row. The index is `first` for
/// the first token of the box, and increases by `pitch` per token along each dimension.
template <typename Visit>
NATTEN_JAX_INLINE void for_each_row(const Box& box, std::int64_t first, const std::int64_t (&pitch)[kRank],
                                    Visit visit) {
  std::int64_t row = 0;
  for (std::int64_t x = 0; x < box.end[0] - box.begin[0]; ++x) {
    for (std::int64_t y = 0; y < box.end[1] - box.begin[1]; ++y) {
      const std::int64_t line = first + x * pitch[0] + y * pitch[1];
      for (std::int64_t z = 0; z < box.end[2] - box.begin[2]; ++z) visit(row++, line + z * pitch[2]);
    }
  }
}

/// Calls visit(row number, offset) for every row of a box. The table entry for a row and a lane has the index
/// `block.bias_index[lane] + offset`.
template <typename Visit>
NATTEN_JAX_INLINE void for_each_offset(const Plan& plan, const LaneBlock& block, const Box& box, Visit visit) {
  std::int64_t pitch[kRank], first = 0;
  table_pitch(plan, pitch);
  for (int dim = 0; dim < kRank; ++dim) first += (box.begin[dim] - block.hull.begin[dim]) * pitch[dim];
  for_each_row(box, first, pitch,
               [&](std::int64_t row, std::int64_t offset) { visit(row, static_cast<std::int32_t>(offset)); });
}

/// Converts biases to the terms that are added to logits in base 2: natten_jax::added_logit, times log2(e).
NATTEN_JAX_INLINE Float added_logits(const Float& biases) {
  Float added;
  NATTEN_JAX_UNROLL
  for (int i = 0; i < kVectors; ++i) {
    const NativeFloat bias = biases.v[i];
    const NativeFloat finite = bias > kLargestLogit ? NativeFloat{} + kLargestLogit : bias;
    const NativeFloat finite_or_nan = bias < __builtin_inff() ? finite : NativeFloat{} + __builtin_nanf("");
    added.v[i] = (bias <= kHiddenLogit ? NativeFloat{} - __builtin_inff() : finite_or_nan) * kLog2E;
  }
  return rounded(added);
}

/// Adds converted biases to a row of logits in base 2.
NATTEN_JAX_INLINE void add_to_logits(float* logits, const Float& added) {
  store(logits, load(logits) + added);
}

/// Adds converted biases to a row of logits that already includes a bias. A key that either bias masks (-infinity)
/// stays masked. All other sums are clipped to finite numbers.
NATTEN_JAX_INLINE void add_to_biased_logits(float* logits, const Float& added) {
  const Float before = load(logits), sum = before + added;
  const Mask hidden = equal(before, -__builtin_inff()) | equal(added, -__builtin_inff());
  store(logits, select(hidden, sum, minimum(maximum(sum, broadcast(-FLT_MAX)), broadcast(FLT_MAX))));
}

/// Adds relative biases to the logits of a lane block.
///
/// Args:
///   plan: plan of the pass.
///   block: the lane block.
///   box: stream tokens of the logits, one per row.
///   tables: tables of the lanes' query heads, contiguous.
///   heads: number of tables.
///   logits: updated in place.
NATTEN_JAX_INLINE void add_relative_bias(const Plan& plan, const LaneBlock& block, const Box& box, const float* tables,
                                         std::int64_t heads, float* logits) {
  const LaneTable table{tables, block.bias_index, static_cast<std::int32_t>(heads * plan.offsets.entries - 1)};
  for_each_offset(plan, block, box, [&](std::int64_t row, std::int32_t offset) {
    add_to_logits(logits + row * kLanes, added_logits(table.at(offset)));
  });
}

/// First query head that shares the keys of an item, as an index into the flattened [batch, heads].
NATTEN_JAX_INLINE std::int64_t first_head(const Problem& p, const Item& item) {
  return item.batch * p.heads + item.kv_head * p.heads_per_kv();
}

/// Adds relative biases and key biases to the logits of a box of keys. The lanes hold queries.
NATTEN_JAX_INLINE void add_biases(const Plan& plan, const Item& item, const TokenMap& keys, const LaneBlock& block,
                                  const Box& box, float* logits) {
  const Problem& p = plan.problem;
  if (plan.arrays.relative_bias != nullptr) {
    const float* tables = plan.arrays.relative_bias + first_head(p, item) * plan.offsets.entries;
    add_relative_bias(plan, block, box, tables, p.heads_per_kv(), logits);
  }
  if (plan.arrays.key_bias != nullptr) {
    const float* biases = plan.arrays.key_bias + item.batch * p.keys() * p.heads + item.kv_head * p.heads_per_kv();
    const auto last = static_cast<std::int32_t>(p.heads_per_kv() - 1);
    for_each_row(box, keys.row(box.begin), keys.pitch, [&](std::int64_t row, std::int64_t token) {
      const float* head_biases = biases + token * p.heads;
      const bool is_one_head = plan.lane_heads == 1;
      const Float added = added_logits(is_one_head ? broadcast(head_biases[block.head[0]])
                                                   : LaneTable{head_biases, block.head, last}.at(0));
      if (plan.arrays.relative_bias == nullptr) {
        add_to_logits(logits + row * kLanes, added);
      } else {
        add_to_biased_logits(logits + row * kLanes, added);
      }
    });
  }
}

/// Adds `gradients`, the gradients of a box's logits, to `sums`, the gradients of the bias tables.
NATTEN_JAX_INLINE void add_to_tables(const Plan& plan, const LaneBlock& block, const Box& box, const float* gradients,
                                     float* sums) {
  const auto last = static_cast<std::int32_t>(plan.problem.heads_per_kv() * plan.offsets.entries - 1);
  const LaneTable table{sums, block.bias_index, last};
  for_each_offset(plan, block, box, [&](std::int64_t row, std::int32_t offset) {
    for (int lane = 0; lane < block.active; ++lane) sums[table.index(lane, offset)] += gradients[row * kLanes + lane];
  });
}

/// Relative biases and key biases of an item whose lanes hold keys. They are processed for one query head at a time.
struct OwnedKeyBiases {
  const Plan& plan;
  const Item& item;
  const Workspace& w;

  NATTEN_JAX_INLINE bool has_tables() const { return plan.arrays.relative_bias != nullptr && !item.owns_additional; }
  NATTEN_JAX_INLINE bool has_keys() const { return plan.arrays.key_bias != nullptr && !item.owns_additional; }

  /// Loads and converts the biases of the lanes' keys, and clears their gradients.
  NATTEN_JAX_INLINE void load_keys(std::int64_t blocks, std::int64_t head) const {
    for (std::int64_t i = 0; has_keys() && i < blocks; ++i) {
      for (int lane = 0; lane < kLanes; ++lane) key_biases(i)[lane] = plan.arrays.key_bias[bias_index(i, lane, head)];
      store(key_biases(i), added_logits(load(key_biases(i))));
      store(sums(i), broadcast(0.0f));
    }
  }

  /// Adds the biases to the logits of a box of queries.
  NATTEN_JAX_INLINE void add(std::int64_t i, const Box& box, std::int64_t rows, std::int64_t head) const {
    if (has_tables()) {
      const float* table = plan.arrays.relative_bias + (first_head(plan.problem, item) + head) * plan.offsets.entries;
      add_relative_bias(plan, w.blocks[i], box, table, 1, w.logits);
    }
    if (has_keys()) {
      const Float added = load(key_biases(i));
      if (has_tables()) {
        for (std::int64_t row = 0; row < rows; ++row) add_to_biased_logits(w.logits + row * kLanes, added);
      } else {
        for (std::int64_t row = 0; row < rows; ++row) add_to_logits(w.logits + row * kLanes, added);
      }
    }
  }

  /// Adds the gradients of the logits, which `w.products` now contains, to the gradients of the key biases.
  NATTEN_JAX_INLINE void sum(std::int64_t i, std::int64_t rows) const {
    if (!has_keys()) return;
    Float box_sum = broadcast(0.0f);
    for (std::int64_t row = 0; row < rows; ++row) box_sum = box_sum + load(w.products + row * kLanes);
    store(sums(i), load(sums(i)) + box_sum);
  }

  /// Stores the gradients of the key biases.
  NATTEN_JAX_INLINE void store_gradients(std::int64_t blocks, std::int64_t head) const {
    for (std::int64_t i = 0; has_keys() && i < blocks; ++i) {
      for (int lane = 0; lane < w.blocks[i].active; ++lane) {
        plan.arrays.key_bias_gradient[bias_index(i, lane, head)] = sums(i)[lane];
      }
    }
  }

 private:
  NATTEN_JAX_INLINE float* key_biases(std::int64_t i) const { return w.statistics + i * kStatistics * kLanes; }
  NATTEN_JAX_INLINE float* sums(std::int64_t i) const { return w.statistics + (i * kStatistics + 1) * kLanes; }

  /// Index of the bias of a lane's key for a query head, in the arrays of key biases and of their gradients.
  NATTEN_JAX_INLINE std::int64_t bias_index(std::int64_t i, int lane, std::int64_t head) const {
    const Problem& p = plan.problem;
    return w.blocks[i].row[lane] / p.heads_kv * p.heads + item.kv_head * p.heads_per_kv() + head;
  }
};

}  // namespace
}  // namespace natten_jax::cpu::NATTEN_JAX_ISA
