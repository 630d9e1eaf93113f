#include "cuda/small/bias_launch.h"

#include <algorithm>

#include "cuda/common/cuda_status.h"
#include "cuda/common/geometry.h"
#include "cuda/small/bias_table.h"
#include "natten_jax/offset_table.h"

namespace natten_jax::small {
namespace {

/// Maximum number of parts into which the tiles are divided (BiasSums::parts). gridDim.y is the number of parts.
constexpr std::int64_t kMostParts = 32768;

/// Returns the shape of the box of offsets in a tile's record, and the layout of the record.
TableBox table_box(const Problem& problem, const std::int64_t (&rows)[kRank], const Region& region) {
  TableBox box{};
  for (int d = 0; d < kRank; ++d) {
    box.by_offsets[d] = cutlass::FastDivmod(static_cast<int>(2 * problem.axes[d].window.kernel_size - 1));
    box.extent[d] = static_cast<int>(offsets_of_tile(problem.axes[d].window, rows[d]));
  }
  for (int i = 0; i < kRank; ++i) box.pitch[region.dimension[i]] = region.sum_pitch[i];
  return box;
}

}  // namespace

GivenTable given_table(const Problem& problem, std::int64_t line, const Arrays& arrays) {
  const OffsetTable offsets = offset_table(problem.axes);
  GivenTable given{};
  given.tables = arrays.relative_bias;
  given.is_per_entry = arrays.relative_bias_tables > 1;
  given.offsets = static_cast<int>(offsets.entries);
  given.offsets_of_line = static_cast<int>(offsets.pitch[1]);
  given.by_line = cutlass::FastDivmod(static_cast<int>(line));
  return given;
}

Status make_products(const Problem& problem, const std::int64_t (&rows)[kRank], const std::int64_t (&columns)[kRank],
                     const Arrays& arrays, float* products, cudaStream_t stream, CommonParams& p) {
  p.relative_bias = products;
  if (!problem.has_relative_bias) return {};
  TableProductsParams table{};
  table.given = given_table(problem, BiasTable(problem.axes, rows, columns).pitch[1], arrays);
  table.scale = problem.scale;
  table.products = products;
  table.entries = p.region.table_entries;
  table.heads = p.heads;
  const std::int64_t tables = tables_of_products(problem, arrays);
  p.is_table_shared = tables == 1;
  return status_of(launch_table_products(table, static_cast<int>(tables * problem.heads), stream));
}

Status prepare_table(const Problem& problem, const TileShapes& tiles, const Arrays& arrays, const Scratch& scratch,
                     cudaStream_t stream, BackwardParams& p, TableParams& table, LaunchShape& shape,
                     LastSumsParams& last) {
  if (!problem.has_relative_bias) return {};
  const BiasSums sums = bias_sums(problem.axes, tiles.kv, tiles.query);
  if (sums.tiles > kMostTiles || sums.parts > kMostParts) {
    return Status::invalid_argument("with a relative bias, a layout has at most 2^20 tiles of queries");
  }
  const Region& region = p.region;
  table.records = p.table_records = scratch.table_records;
  table.sums = scratch.table_sums;
  table.box = p.table_box = table_box(problem, tiles.kv, region);
  table.tiles = p.table_tiles = static_cast<int>(sums.tiles);
  table.record = region.record;
  table.entries = region.gradients;
  for (int d = 0; d < kRank; ++d) {
    table.axis[d] = device_axis(problem.axes[d], tiles.kv[d], tiles.query[d]);
    table.by_tiles[d] = cutlass::FastDivmod(table.axis[d].dilation * table.axis[d].q_tiles);
  }
  const std::int64_t items = problem.batch * problem.heads, chunks = region.gradients / kEntriesOfChunk;
  shape = {dim3(static_cast<unsigned>(items), static_cast<unsigned>(sums.parts)), 0, 0,
           stream};  // launch_table_gradient sets the number of threads and the shared memory
  last.sums = scratch.table_sums;
  last.result = arrays.relative_bias_gradient;
  last.next_table = chunks;
  const bool is_per_entry = arrays.relative_bias_tables > 1;
  last.next_sum = (is_per_entry ? items : problem.heads) * chunks;
  last.count = static_cast<int>(sums.parts * (is_per_entry ? 1 : problem.batch));
  last.offsets = static_cast<int>(offset_table(problem.axes).entries);
  return {};
}

bool prepare_whole_bias(const Problem& problem, const TileShapes& tiles, const Arrays& arrays, const Scratch& scratch,
                        WholeBiasParams& p, LaunchShape& shape, LastSumsParams& last) {
  Region& region = p.region;
  p.given = given_table(problem, BiasTable(problem.axes, tiles.kv, tiles.query).pitch[1], arrays);
  p.entries_of_batch = static_cast<int>(problem.batch);
  // A CTA keeps only one table in shared memory. So it processes several items only if they share a table.
  const bool has_one = tables_of_products(problem, arrays) == 1;
  region.items_of_cta = has_one ? static_cast<int>(std::min<std::int64_t>(region.items_of_cta, problem.batch)) : 1;
  p.pieces = static_cast<int>(divide_up(problem.batch, region.items_of_cta));
  constexpr std::int64_t kMostCtas = 65535;  // per region
  if (p.pieces * problem.heads > kMostCtas) return false;
  shape.blocks.y = static_cast<unsigned>(p.pieces * problem.heads);
  p.table_records = scratch.table_records;
  p.table_box = table_box(problem, tiles.kv, region);
  const std::int64_t chunks = region.gradients / kEntriesOfChunk;
  last.sums = scratch.table_records;
  last.result = arrays.relative_bias_gradient;
  last.next_table = p.sums_of_table() * chunks;
  last.next_sum = chunks;
  last.count = static_cast<int>(p.sums_of_table());
  last.offsets = p.given.offsets;
  return true;
}

}  // namespace natten_jax::small
