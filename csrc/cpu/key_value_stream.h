// Streams the keys and values that the queries of an item attend to (see), and computes the logits. Tiles of layout
// tokens come first, additional tokens last.
//
// This is kernel code: it is compiled once per instruction set, each time in a separate namespace.
#pragma once

#include "cpu/biases.h"
#include "cpu/microkernels.h"
#include "cpu/stream.h"

namespace natten_jax::cpu::NATTEN_JAX_ISA {
namespace {

/// Calls visit(block number, box, is_masked, rows, is_in_layout) for each lane block and each box of keys that its
/// queries see. Before each call, computes the logits of the block and the box, and writes them to the workspace, as
/// well as the addresses of the box's keys and values.
///
/// Args:
///   plan: plan of the pass.
///   item: the work item.
///   blocks: number of lane blocks of the item.
///   w: workspace that contains the lane blocks and their queries.
///   exponent_scales: exponent_scales(block number) returns the exponent scales of the block's lanes.
///   visit: the function that is called. `is_masked`: true if some queries do not see all keys of the box. `rows`:
///     number of keys in the box. `is_in_layout`: true for keys of the layout, and false for additional keys.
template <typename T, typename Scales, typename Visit>
NATTEN_JAX_INLINE void stream_keys_and_values(const Plan& plan, const Item& item, std::int64_t blocks,
                                              const Workspace& w, Scales exponent_scales, Visit visit) {
  const Problem& p = plan.problem;
  const bool has_biases = plan.arrays.relative_bias != nullptr || plan.arrays.key_bias != nullptr;
  const auto find_logits = [&](std::int64_t i, std::int64_t rows) {
    dot(w.lanes_a + i * p.head_dim * kLanes, w.rows_a, rows, p.head_dim, load(exponent_scales(i)), w.logits);
  };
  const TokenMap tokens = stream_tokens(plan, item);
  const std::int64_t first = item.batch * p.keys() * p.heads_kv + item.kv_head;
  const T* keys = static_cast<const T*>(plan.arrays.key) + first * p.head_dim;
  const T* values = static_cast<const T*>(plan.arrays.value) + first * p.head_dim_v;
  stream_boxes<T>(
      w.blocks, blocks, tokens, plan.stream_tile,
      [&](const Box& tile) {
        return RowPair{float_rows(tile, tokens, keys, p.heads_kv, p.head_dim, w.packed_a),
                       float_rows(tile, tokens, values, p.heads_kv, p.head_dim_v, w.packed_b)};
      },
      [&](std::int64_t i, const Box& box, const RowPair& rows) {
        write_row_addresses(rows.a, box, w.rows_a);
        write_row_addresses(rows.b, box, w.rows_b);
        find_logits(i, volume(box));
        if (has_biases) add_biases(plan, item, tokens, w.blocks[i], box, w.logits);
        visit(i, box, !contains(w.blocks[i].core, box), volume(box), true);
      });

  if (p.additional_kv == 0) return;
  const TokenMap line{0, {0, 0, 1}, {}};
  const Box all{{0, 0, 0}, {1, 1, p.additional_kv}};
  const std::int64_t shape[kRank] = {1, 1, plan.stream_tokens};
  const std::int64_t first_additional = item.batch * p.additional_kv * p.heads_kv + item.kv_head;
  const T* additional_keys = static_cast<const T*>(plan.arrays.additional_keys) + first_additional * p.head_dim;
  const T* additional_values = static_cast<const T*>(plan.arrays.additional_values) + first_additional * p.head_dim_v;
  for_each_tile(all, line, shape, [&](const Box& tile) {
    const FloatRows key_rows = float_rows(tile, line, additional_keys, p.heads_kv, p.head_dim, w.packed_a);
    const FloatRows value_rows = float_rows(tile, line, additional_values, p.heads_kv, p.head_dim_v, w.packed_b);
    for (std::int64_t i = 0; i < blocks; ++i) {
      write_row_addresses(key_rows, tile, w.rows_a);
      write_row_addresses(value_rows, tile, w.rows_b);
      find_logits(i, volume(tile));
      visit(i, tile, false, volume(tile), false);
    }
  });
}

}  // namespace
}  // namespace natten_jax::cpu::NATTEN_JAX_ISA
