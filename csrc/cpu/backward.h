// The two backward passes: one computes the query gradient, the other the key and value gradients. Both passes
// recompute the probabilities from the saved logsumexp.
//
// This is kernel code: it is compiled once per instruction set, each time in a separate namespace.
#pragma once

#include "cpu/head_scales.h"
#include "cpu/key_value_stream.h"
#include "cpu/microkernels.h"
#include "cpu/transpose.h"
#include "natten_jax/logsumexp.h"

namespace natten_jax::cpu::NATTEN_JAX_ISA {
namespace {

/// Scalars of each query that the backward passes need. Each member is an array with one float per query.
struct QueryValues {
  float* logsumexp;  ///< In base 2. +inf for a query without keys, so that its probabilities are zero.
  float* distance;   ///< `distance` and `log2_sum` are the parts of Remainder (natten_jax/logsumexp.h).
  float* log2_sum;
  float* delta;

  /// Arrays that begin at `first` and follow each other at distances of `pitch` floats.
  NATTEN_JAX_INLINE QueryValues(float* first, std::int64_t pitch)
      : logsumexp(first), distance(first + pitch), log2_sum(first + 2 * pitch), delta(first + 3 * pitch) {}

  /// Sets element `i` of each array to the values of the query at `row` of the call's arrays.
  NATTEN_JAX_INLINE void set(std::int64_t i, const Arrays& arrays, std::int64_t row) const {
    const float saved = arrays.logsumexp[row];
    logsumexp[i] = saved == -__builtin_inff() ? __builtin_inff() : base2_logsumexp(saved);
    const Remainder parts = unpack_remainder(arrays.remainder == nullptr ? 0.0f : arrays.remainder[row]);
    distance[i] = parts.distance;
    log2_sum[i] = parts.log2_sum;
    delta[i] = arrays.delta[row];
  }
};

/// Probability of a logit. All arguments are in base 2. Without the minimum, rounding errors could make the result
/// larger than one.
NATTEN_JAX_INLINE Float weight(const Float& logit, const Float& logsumexp, const Float& distance,
                               const Float& log2_sum) {
  return exp2(minimum((logit - logsumexp) - distance, broadcast(0.0f)) - log2_sum);
}

template <typename T>
void query_gradient(const Plan& plan, const Item& item, std::byte* scratch) {
  const Problem& p = plan.problem;
  const Workspace w = plan.workspace(scratch);
  const std::int64_t blocks = make_lane_blocks(plan, item, w.blocks);
  const auto values_of = [&w](std::int64_t i) { return QueryValues(w.statistics + i * kStatistics * kLanes, kLanes); };
  const auto exponent_scales = [&w](std::int64_t i) { return w.statistics + (i * kStatistics + 4) * kLanes; };
  const bool has_table = plan.arrays.relative_bias != nullptr;
  const std::int64_t entries = has_table ? p.heads_per_kv() * plan.offsets.entries : 0;
  clear(w.table, entries);
  for (std::int64_t i = 0; i < blocks; ++i) {
    const LaneBlock& block = w.blocks[i];
    load_lanes(block, static_cast<const T*>(plan.arrays.query), p.head_dim, 1.0f, w.lines,
               w.lanes_a + i * p.head_dim * kLanes);
    load_lanes(block, static_cast<const T*>(plan.arrays.out_cotangent), p.head_dim_v, 1.0f, w.lines,
               w.lanes_b + i * p.head_dim_v * kLanes);
    clear(w.sums_a + i * p.head_dim * kLanes, p.head_dim * kLanes);
    write_exponent_scales(p, item, block, exponent_scales(i));
    for (int lane = 0; lane < kLanes; ++lane) values_of(i).set(lane, plan.arrays, block.row[lane]);
  }

  stream_keys_and_values<T>(
      plan, item, blocks, w, exponent_scales,
      [&](std::int64_t i, const Box& box, bool is_masked, std::int64_t rows, bool is_in_layout) {
        dot(w.lanes_b + i * p.head_dim_v * kLanes, w.rows_b, rows, p.head_dim_v, broadcast(1.0f), w.products);
        const QueryValues values = values_of(i);
        const Float logsumexp = load(values.logsumexp), distance = load(values.distance),
                    log2_sum = load(values.log2_sum), delta = load(values.delta);
        const auto gradient = [&](std::int64_t row) {
          const Float probability = weight(load(w.logits + row * kLanes), logsumexp, distance, log2_sum);
          return probability * (load(w.products + row * kLanes) - delta);
        };
        if (is_masked) {
          const Float none = broadcast(0.0f);
          for_each_masked_row(w.blocks[i], box, [&](std::int64_t row, const Mask& mask) {
            store(w.logits + row * kLanes, select(mask, gradient(row), none));
          });
        } else {
          for (std::int64_t row = 0; row < rows; ++row) store(w.logits + row * kLanes, gradient(row));
        }
        if (has_table && is_in_layout) add_to_tables(plan, w.blocks[i], box, w.logits, w.table);
        accumulate<false>(w.logits, w.rows_a, rows, p.head_dim, logsumexp, w.sums_a + i * p.head_dim * kLanes);
      });

  for (std::int64_t i = 0; i < blocks; ++i) {
    alignas(64) float scale[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) {
      scale[lane] = scale_of_lane(p, item, w.blocks[i], lane).query_gradient;
    }
    store_lanes(w.blocks[i], w.sums_a + i * p.head_dim * kLanes, p.head_dim, scale, w.lines,
                static_cast<T*>(plan.arrays.query_gradient));
  }
  // `w.table` holds the sums of this item. They are added to `item.table_sums`, the sums of several items. As in
  // accumulate_columns, two levels of sums keep rounding errors small.
  for (std::int64_t entry = 0; entry < entries; ++entry) item.table_sums[entry] += w.table[entry];
}

/// Sets `values` to the QueryValues of all queries of a box, in the order of for_each_masked_row.
NATTEN_JAX_INLINE void load_query_values(const Arrays& arrays, const TokenMap& tokens, std::int64_t first_row,
                                         std::int64_t heads, const Box& box, const QueryValues& values) {
  std::int64_t i = 0;
  const std::int64_t first = tokens.row(box.begin);
  for (std::int64_t x = 0; x < box.end[0] - box.begin[0]; ++x) {
    for (std::int64_t y = 0; y < box.end[1] - box.begin[1]; ++y) {
      const std::int64_t line = first + x * tokens.pitch[0] + y * tokens.pitch[1];
      for (std::int64_t z = 0; z < box.end[2] - box.begin[2]; ++z) {
        values.set(i++, arrays, first_row + (line + z * tokens.pitch[2]) * heads);
      }
    }
  }
}

/// Replaces `logits` by probabilities. Replaces `products` (output cotangents times values) by gradients of the logits.
NATTEN_JAX_INLINE void differentiate(const LaneBlock& block, const Box& box, bool is_masked, std::int64_t rows,
                                     const QueryValues& values, float* logits, float* products) {
  const auto probability_of = [&](std::int64_t row) {
    return weight(load(logits + row * kLanes), broadcast(values.logsumexp[row]), broadcast(values.distance[row]),
                  broadcast(values.log2_sum[row]));
  };
  if (is_masked) {
    const Float none = broadcast(0.0f);
    for_each_masked_row(block, box, [&](std::int64_t row, const Mask& mask) {
      const Float probability = probability_of(row);
      const Float gradient = probability * (load(products + row * kLanes) - broadcast(values.delta[row]));
      store(logits + row * kLanes, select(mask, probability, none));
      store(products + row * kLanes, select(mask, gradient, none));
    });
    return;
  }
  for (std::int64_t row = 0; row < rows; ++row) {
    const Float probability = probability_of(row);
    store(logits + row * kLanes, probability);
    store(products + row * kLanes, probability * (load(products + row * kLanes) - broadcast(values.delta[row])));
  }
}

template <typename T>
void key_value_gradient(const Plan& plan, const Item& item, std::byte* scratch) {
  const Problem& p = plan.problem;
  const Arrays& arrays = plan.arrays;
  const Workspace w = plan.workspace(scratch);
  const std::int64_t blocks = make_lane_blocks(plan, item, w.blocks);
  const T* keys = static_cast<const T*>(item.owns_additional ? arrays.additional_keys : arrays.key);
  const T* values = static_cast<const T*>(item.owns_additional ? arrays.additional_values : arrays.value);
  for (std::int64_t i = 0; i < blocks; ++i) {
    load_lanes(w.blocks[i], keys, p.head_dim, 1.0f, w.lines, w.lanes_a + i * p.head_dim * kLanes);
    load_lanes(w.blocks[i], values, p.head_dim_v, 1.0f, w.lines, w.lanes_b + i * p.head_dim_v * kLanes);
    clear(w.sums_a + i * p.head_dim * kLanes, p.head_dim * kLanes);
    clear(w.sums_b + i * p.head_dim_v * kLanes, p.head_dim_v * kLanes);
  }

  const TokenMap tokens = stream_tokens(plan, item);
  const QueryValues query_values(w.row_values, plan.stream_tokens + kRowPadding);
  // All query heads of the item share its keys, and query heads that share keys have equal scales.
  const HeadScale head_scale = p.scale.for_head(first_head(p, item));
  const OwnedKeyBiases biases{plan, item, w};
  // All query heads add to the same gradients, because they share the keys and values.
  for (std::int64_t head = 0; head < p.heads_per_kv(); ++head) {
    const std::int64_t first = item.batch * p.queries() * p.heads + item.kv_head * p.heads_per_kv() + head;
    const T* queries = static_cast<const T*>(arrays.query) + first * p.head_dim;
    const T* cotangents = static_cast<const T*>(arrays.out_cotangent) + first * p.head_dim_v;
    biases.load_keys(blocks, head);
    stream_boxes<T>(
        w.blocks, blocks, tokens, plan.stream_tile,
        [&](const Box& tile) {
          return RowPair{float_rows(tile, tokens, queries, p.heads, p.head_dim, w.packed_a),
                         float_rows(tile, tokens, cotangents, p.heads, p.head_dim_v, w.packed_b)};
        },
        [&](std::int64_t i, const Box& box, const RowPair& pair) {
          const std::int64_t rows = volume(box);
          write_row_addresses(pair.a, box, w.rows_a);
          write_row_addresses(pair.b, box, w.rows_b);
          load_query_values(arrays, tokens, first, p.heads, box, query_values);
          dot(w.lanes_a + i * p.head_dim * kLanes, w.rows_a, rows, p.head_dim, broadcast(exponent_scale(head_scale)),
              w.logits);
          biases.add(i, box, rows, head);
          dot(w.lanes_b + i * p.head_dim_v * kLanes, w.rows_b, rows, p.head_dim_v, broadcast(1.0f), w.products);
          differentiate(w.blocks[i], box, !contains(w.blocks[i].core, box), rows, query_values, w.logits, w.products);
          biases.sum(i, rows);
          const Float unused = broadcast(0.0f);
          accumulate<false>(w.products, w.rows_a, rows, p.head_dim, unused, w.sums_a + i * p.head_dim * kLanes);
          accumulate<false>(w.logits, w.rows_b, rows, p.head_dim_v, unused, w.sums_b + i * p.head_dim_v * kLanes);
        });
    biases.store_gradients(blocks, head);
  }

  alignas(64) float scale[kLanes];
  alignas(64) float one[kLanes];
  store(scale, broadcast(head_scale.logits));
  store(one, broadcast(1.0f));
  T* key_gradient = static_cast<T*>(item.owns_additional ? arrays.additional_keys_gradient : arrays.key_gradient);
  T* value_gradient = static_cast<T*>(item.owns_additional ? arrays.additional_values_gradient : arrays.value_gradient);
  for (std::int64_t i = 0; i < blocks; ++i) {
    store_lanes(w.blocks[i], w.sums_a + i * p.head_dim * kLanes, p.head_dim, scale, w.lines, key_gradient);
    store_lanes(w.blocks[i], w.sums_b + i * p.head_dim_v * kLanes, p.head_dim_v, one, w.lines, value_gradient);
  }
}

}  // namespace
}  // namespace natten_jax::cpu::NATTEN_JAX_ISA
