// Kernel that computes all gradients of layouts that fit in one CTA. The CTA loads a layout once per batch entry and
// head. Each warp first computes the gradients of 16 queries, then the gradients of the keys and values at the same
// positions.
//
// Separate kernels for query gradients and for key and value gradients would need two launches, and would read and
// write 12 arrays instead of 8. On an H200, layouts of 7x7 tokens with 1,024 heads take 21 microseconds, and took 29
// with separate kernels.
#pragma once

#include "cuda/small/head_terms.cuh"
#include "cuda/small/key_value_gradient.cuh"
#include "cuda/small/query_gradient.cuh"
#include "cuda/small/whole_table.cuh"

namespace natten_jax::small {

/// Boxes of a stage, in their order in shared memory. The first two are the columns of query rows: keys and values. The
/// next two are the columns of key rows: queries and output cotangents. The last one has the outputs, from which delta
/// is computed.
enum WholeBox { kWholeKeys, kWholeValues, kWholeQueries, kWholeCotangents, kWholeOuts };

template <class Element, int kHeadDim, Terms kTerms, Feature kFeature>
CUTE_DEVICE void differentiate_whole(const WholeParams<kFeature == Feature::kRelativeBias>& p) {
  constexpr bool kHasBias = kFeature == Feature::kRelativeBias, kHasKeyBias = kFeature == Feature::kKeyBias;
  constexpr bool kHasBoxes = true, kIsWhole = true, kHasTerms = kTerms == Terms::kPerHead;
  using Rows = RowTile<kHeadDim>;
  using Operand = RowOperand<Element, kHeadDim>;
  using Columns = ColumnRows<kHeadDim, kHasBoxes>;
  using Items = std::conditional_t<kHasBias, HeadItems, CtaItems>;
  extern __shared__ __align__(1024) char raw[];
  if constexpr (kHasTerms) allow_next_kernel();  // PDL: the next kernel adds up the sink gradients' parts
  Tables query_tables, key_tables;
  TilePlan queries_plan, keys_plan;
  BoxLoads<kHeadDim, Kernel::kWholeGradient, Items> loads(p, raw);
  const Items items(p);
  loads.take(items, true);
  if constexpr (kHasTerms) clear_parts_of_sinks(p, items);
  WholeTable<kHasBias> table(p, raw);
  table.start(items.at(p, 0));
  NoLoads none;
  const auto no_rows = [] {};
  if (!make_plan<kHeadDim, Owner::kQueries, kHasBoxes, kFeature, kIsWhole>(p, raw, query_tables, queries_plan, loads,
                                                                           no_rows))
    return;
  make_plan<kHeadDim, Owner::kKeys, kHasBoxes, kFeature, kIsWhole>(p, raw, key_tables, keys_plan, none, no_rows, {}, 1);
  if constexpr (kHasBias) clear_sums(p, raw);
  table.plan(queries_plan, items.at(p, 0));

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const std::uint32_t second = p.region.shared.second;
  // The plans of query rows and of key rows assume that columns begin at the start of a stage. The columns of key rows
  // begin two boxes later, so `compute` passes an address two boxes into the stage. This address must not shift the
  // addresses of the statistics and of the relative bias, so subtract the size of two boxes from their offsets.
  keys_plan.statistic -= kWholeQueries * second;
  keys_plan.statistic_of_column -= kWholeQueries * second;
  if constexpr (kHasBias) {
    keys_plan.entry[0] -= kWholeQueries * second;
    keys_plan.entry[1] -= kWholeQueries * second;
  }
  // Query rows are also columns of the box. Get the column indices of the lane's two rows.
  int column_of_row[2];
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    column_of_row[r] = __shfl_sync(0xffffffffu, queries_plan.column_of_row, lane / 4 + 8 * r);
  }
  ColumnKeyBias<kHasKeyBias> key_bias(p, query_tables, queries_plan, items.at(p, 0));
  const int warps = loads.warps_with_rows();
  const auto scale_of = [&](const Item& item) -> HeadScale {
    if constexpr (kHasTerms) return item.scale(p);
    return {p.scale.uniform, p.scale.uniform};
  };
  const auto compute = [&](const Item& item, std::uint32_t stage, std::uint32_t rows, const auto& phases) {
    RowStatistics<Element> statistics(p, item, query_tables.row_indices);
    [[maybe_unused]] const ItemSink sink(p, item);
    RowKeyBias<kHasKeyBias> bias_of_rows(p, key_tables.row_indices);
    key_bias.prepare(item);
    phases.rows_are_read();
    const auto rows_of = [&](WholeBox box) { return Operand::from_box(stage + box * second + queries_plan.row); };
    {
      const Operand queries = rows_of(kWholeQueries), cotangents = rows_of(kWholeCotangents);
      statistics.find_delta(cotangents, rows_of(kWholeOuts));
      statistics.template finish<kFeature>(p, [&](int r, float4 numbers) {
        const std::uint32_t at = stage + p.region.shared.statistics + kStatisticsBytes * column_of_row[r];
        *static_cast<float4*>(__cvta_shared_to_generic(at)) = numbers;
      });
      if constexpr (kHasTerms) sink.write_part(p, item, statistics.at, statistics.logsumexp, statistics.delta);
      float gradient[kHeadDim / 8][4] = {};
      add_query_gradient<Columns, kFeature>(gradient, statistics, queries, cotangents, scale_of(item).logits * kLog2E,
                                            queries_plan, query_tables, 0, stage, shared_address(raw));
      key_bias.release(item);
      bias_of_rows.load(item);  // the loads overlap with the stores and the barrier below
      table.template add<Element>(queries_plan);
      const float scale = scale_of(item).query_gradient;
      Rows::template store<Element>(gradient, scale, scale, query_tables.row_indices,
                                    row_of(p.query_gradient, item.query_row, kHeadDim), kHeadDim, rows);
    }
    // After this barrier, the statistics of all rows are complete, and so are the item's sums for the bias gradient.
    sync_warps(warps);
    // This kernel does not support query heads that share a key/value head. It would have to keep the sums for the
    // shared keys and values in registers while it processes several items.
    KeyValueSums<Element, kHeadDim, true> sums;
    const Operand keys = rows_of(kWholeKeys), values = rows_of(kWholeValues);
    KeyBiasSums key_bias_sums;
    if constexpr (kHasKeyBias) bias_of_rows.take(key_bias_sums.biases, scale_of(item).logits);
    sums.template add<Columns, kFeature>(key_bias_sums, keys, values, scale_of(item).logits * kLog2E, keys_plan,
                                         key_tables, stage + kWholeQueries * second);
    phases.columns_are_read();
    bias_of_rows.store(item, key_bias_sums.sums);
    sums.store(p, scale_of(item).logits, item.key_row(p), key_tables.row_indices, HeadDims<kHeadDim, kHasBoxes>(p),
               rows, rows);
  };
  const auto nothing = [](const Item&, std::uint32_t) {};
  loads.for_items(query_tables, queries_plan, warp * Rows::kBytes, nothing, nothing, compute);
  table.write(queries_plan, items);
}

template <class Element, int kHeadDim, Terms kTerms, Feature kFeature>
__global__ void __launch_bounds__(32 * resident_warps(Kernel::kWholeGradient, kHeadDim))
    natten_jax_small_whole_gradient(const __grid_constant__ WholeParams<kFeature == Feature::kRelativeBias> p) {
  if constexpr (is_compiled(true)) differentiate_whole<Element, kHeadDim, kTerms, kFeature>(p);
}

}  // namespace natten_jax::small
