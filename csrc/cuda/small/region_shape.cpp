#include "cuda/small/region_shape.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <string>

#include "cuda/small/bias_results.h"
#include "cuda/small/bias_table.h"

namespace natten_jax::small {
namespace {

/// Alignment in bytes of tables and stages (kAlignment), and of boxes (kBoxAlignment), as TMA's swizzle requires.
constexpr std::int64_t kAlignment = 128;
constexpr std::int64_t kBoxAlignment = 1024;

/// Maximum extent of a box along a dimension, in tokens of the array.
constexpr std::int64_t kLargestBox = 256;

constexpr std::int64_t kMostRows = std::int64_t{1} << 31;

/// Returns a * b * c without overflow. Returns kMostRows if a factor or a * b is at least kMostRows, and the product is
/// not zero.
std::int64_t saturated_product(std::int64_t a, std::int64_t b, std::int64_t c) {
  if (a == 0 || b == 0 || c == 0) return 0;
  return a >= kMostRows || b >= kMostRows || c >= kMostRows || a * b >= kMostRows ? kMostRows : a * b * c;
}

std::int64_t align(std::int64_t bytes, std::int64_t alignment = kAlignment) {
  return divide_up(bytes, alignment) * alignment;
}

/// Sets `dimension` to the problem's dimension for each dimension of a region. Returns false if a group extends along
/// three dimensions.
bool choose_dimensions(const Side (&sides)[kRank], const std::int64_t (&rows)[kRank],
                       const std::int64_t (&columns)[kRank], int (&dimension)[kRank]) {
  std::array<int, kRank> order{2, 1, 0};
  // Dimensions along which a group extends come first. Within these two sets, dimensions with more groups come first.
  const auto groups = [&](int d) { return divide_up(sides[d].visible_columns(rows[d]), columns[d]); };
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    if ((columns[a] > 1) != (columns[b] > 1)) return columns[a] > 1;
    return groups(a) > groups(b);
  });
  if (columns[order[2]] > 1) return false;
  // Lines run along dimension 1. If a group extends along a single dimension, and there is one column in the next
  // dimension (as in a sequence), lines run along the group's dimension.
  if (columns[order[1]] == 1 && groups(order[1]) == 1) std::swap(order[0], order[1]);
  // If a group extends along two dimensions, lines run along the dimension with more groups.
  if (columns[order[1]] > 1 && groups(order[0]) > groups(order[1])) std::swap(order[0], order[1]);
  std::copy(order.begin(), order.end(), dimension);
  return true;
}

/// Number of 16-row buffers per warp, by Kernel. The forward kernel has a buffer for queries. The query gradient kernel
/// has buffers for queries, dO and O, and the key/value gradient kernel for keys and values. The kernel of whole
/// layouts needs no buffers, because its rows are also columns.
constexpr int kRowBuffers[] = {1, 3, 2, 0};

/// Widens a box for two reasons: the distance between the two groups of a pair has to be a multiple of 8 rows, and the
/// rows of a group have to be in different banks. A row's bank depends on its index modulo 8, by which the swizzle
/// permutes the row's chunks. Returns false if the box cannot be widened or becomes too large.
bool widen_box(const Side (&sides)[kRank], const Region& region, const std::int64_t (&groups)[kRank],
               std::int64_t (&box)[kRank]) {
  const int wide = region.group[0], high = region.group[1];
  if (groups[0] > 1 && wide < kColumns) return false;
  // A group has `high` sequences of `wide` consecutive rows. The indices of all eight rows have to differ modulo 8.
  const std::int64_t step = wide == 1 ? 2 : 2 * wide;
  box[0] = wide == kColumns ? align(box[0], kColumns) : align(box[0] - wide, step) + wide;
  if (groups[2] > 1) box[1] = align(box[1], high);
  for (int i = 0; i < kRank; ++i) {
    if (box[i] * sides[region.dimension[i]].axis.window.dilation > kLargestBox) return false;
  }
  return true;
}

/// Shapes of a region's tile and group, in the order of the problem's dimensions.
struct TiledDimensions {
  std::int64_t tile[kRank], group[kRank];

  explicit TiledDimensions(const Region& region) {
    for (int i = 0; i < kRank; ++i) {
      tile[region.dimension[i]] = region.tile[i];
      group[region.dimension[i]] = region.group[i];
    }
  }
};

/// Fills in the layout of the table of a relative bias.
void lay_out_table(const Problem& problem, Region& region) {
  const TiledDimensions tiled(region);
  const BiasTable table(problem.axes, tiled.tile, tiled.group);
  const auto clamped_entries = [](std::int64_t entries) {
    return static_cast<int>(std::min(entries, kMostBiasEntries + 1));
  };
  region.table_entries = clamped_entries(table.entries);
  region.gradients = clamped_entries(table.gradients);
  for (int i = 0; i < kRank; ++i) region.table_pitch[i] = clamped_entries(table.pitch[region.dimension[i]]);
  for (const bool rows_are_keys : {false, true}) {
    const int bytes = rows_are_keys ? -kBytesOfEntry : kBytesOfEntry;
    region.next_entry[rows_are_keys] = bytes * region.table_pitch[region.group[0] > 1 ? 0 : 1];
    region.next_entry_of_group[rows_are_keys] = bytes * region.group[1] * region.table_pitch[1];
  }
}

/// Computes the layout of the sums for the gradient of a relative bias. `groups` are the maximum numbers of groups of a
/// tile in each dimension. Returns false if the kernels do not support the tile's shape, or if the table or the sums
/// exceed the kernels' index range.
bool lay_out_sums(const Problem& problem, const std::int64_t (&groups)[kRank], Region& region) {
  if (region.table_entries > kMostBiasEntries) return false;
  // If a dimension has a single token, tile rows past this token are not masked. Their results are not used, but the
  // sums would include them.
  for (int i = 0; i < kRank; ++i) {
    if (region.tile[i] > 1 && problem.axes[region.dimension[i]].query.extent == 1) return false;
  }
  const TiledDimensions tiled(region);
  const RecordLayout record(problem.axes, tiled.tile, region.dimension[region.group[0] > 1 ? 0 : 1]);
  region.record = static_cast<int>(most_numbers(problem.axes, tiled.tile, tiled.group));
  std::int64_t margin = 0, last_entry = 0, last_sum = 0;
  for (int i = 0; i < kRank; ++i) {
    const std::int64_t pitch = region.table_pitch[i], sum_pitch = record.pitch[region.dimension[i]];
    // The last pair of a line may include a group outside of the window.
    const std::int64_t columns = (i == 1 ? 2 * divide_up(groups[i], 2) : groups[i]) * region.group[i];
    margin += (region.tile[i] - 1 + region.group[i] * (i == 1 ? 2 : 1) - 1) * pitch;
    last_entry += columns * pitch;
    last_sum += columns * sum_pitch;
    region.sum_pitch[i] = static_cast<int>(sum_pitch);
  }
  region.table_margin = static_cast<int>(divide_up(margin, kEntriesOfChunk) * kEntriesOfChunk);
  region.next_sum_of_group = kBytesOfSum * region.group[1] * region.sum_pitch[1];
  return std::max(kBytesOfEntry * last_entry, kBytesOfSum * last_sum) < std::int64_t{1} << kEntryBits;
}

}  // namespace

Status begin_region(const Problem& problem, const Side (&sides)[kRank], const std::int64_t (&rows)[kRank],
                    const std::int64_t (&columns)[kRank], Region& region) {
  if (rows[0] * rows[1] * rows[2] != kRows || columns[0] * columns[1] * columns[2] != kColumns) {
    return Status::invalid_argument("tiles of small windows have " + std::to_string(kRows) + " and " +
                                    std::to_string(kColumns) + " tokens");
  }
  if (compiled_head_dim(problem) == 0) {
    return Status::invalid_argument("heads for small windows have at most " + std::to_string(kLargestHeadDim) +
                                    " dimensions");
  }
  if (problem.has_relative_bias && (compiled_head_dim(problem) > kLargestBiasedHeadDim || problem.additional_kv > 0)) {
    return Status::invalid_argument("with a relative bias, heads for small windows have at most " +
                                    std::to_string(kLargestBiasedHeadDim) + " dimensions and no additional tokens");
  }
  if (problem.has_key_bias && (compiled_head_dim(problem) > kLargestBiasedHeadDim || problem.has_relative_bias)) {
    return Status::invalid_argument("with a key_bias, heads for small windows have at most " +
                                    std::to_string(kLargestBiasedHeadDim) + " dimensions and no relative_bias");
  }
  // Kernels use 32-bit indices for the rows of arrays.
  for (const std::int64_t rows_of_array : {saturated_product(problem.batch, problem.queries(), problem.heads),
                                           saturated_product(problem.batch, problem.keys(), problem.heads_kv),
                                           saturated_product(problem.batch, problem.additional_kv, problem.heads_kv)}) {
    if (rows_of_array >= kMostRows) {
      return Status::invalid_argument(
          "batch entries times tokens times heads must be less than 2^31 for small windows");
    }
  }
  region = {};
  if (!choose_dimensions(sides, rows, columns, region.dimension)) {
    return Status::invalid_argument("a group of 8 columns must lie in two dimensions");
  }
  for (int i = 0; i < kRank; ++i) {
    region.tile[i] = static_cast<int>(rows[region.dimension[i]]);
    region.group[i] = static_cast<int>(columns[region.dimension[i]]);
    region.tiles[i] = 1;
  }
  if (problem.has_relative_bias) lay_out_table(problem, region);
  return {};
}

bool complete_region(const Problem& problem, const Side (&sides)[kRank], Kernel kernel, int head_dim, int stages,
                     const Device& device, Region& region) {
  std::int64_t box[kRank], groups[kRank];
  double mean_groups[kRank];
  const bool is_whole = kernel == Kernel::kWholeGradient;
  region.warps = 1;
  region.count = 1;
  for (int i = 0; i < kRank; ++i) {
    const Side& side = sides[region.dimension[i]];
    const std::int64_t rows = std::int64_t{region.tile[i]} * region.tiles[i];
    region.warps *= region.tiles[i];
    region.regions[i] = static_cast<int>(divide_up(side.rows(), rows));
    region.count = saturated_product(region.count, side.axis.window.dilation, region.regions[i]);
    box[i] = side.visible_columns(region.tile[i], region.tiles[i]);
    const std::int64_t visible = side.visible_columns(region.tile[i]);
    // In the kernel of whole layouts, a warp owns 16 keys in addition to 16 queries.
    const Side keys{side.axis, true, Coverage::kComplete};
    groups[i] =
        divide_up(is_whole ? std::max(visible, keys.visible_columns(region.tile[i])) : visible, region.group[i]);
    mean_groups[i] = side.mean_groups(region.tile[i], region.group[i]);
    if (is_whole && region.regions[i] > 1) return false;
  }
  const std::int64_t lines = groups[0] * groups[2], line_pairs = divide_up(groups[1], 2);
  const std::int64_t additional_pairs = divide_up(problem.additional_kv, 2 * kColumns);
  const std::int64_t pairs = lines * line_pairs + additional_pairs;
  // Kernels compute two pairs at a time, and prefetch two more. Pairs of the window and additional pairs are rounded up
  // to even numbers separately.
  const std::int64_t entries = 2 * (divide_up(lines * line_pairs, 2) + divide_up(additional_pairs, 2) + 1);
  if (region.has_boxes && !widen_box(sides, region, groups, box)) return false;
  if (problem.has_relative_bias && !lay_out_sums(problem, groups, region)) return false;
  const std::int64_t plane = box[0] * box[1];
  // The last pair of a line may extend past the box, into memory that holds no columns.
  const std::int64_t memory_rows = plane * box[2] + box[0] * 2 * region.group[1] + region.group[0];
  constexpr std::int64_t kEnough = 1 << 20;
  if (memory_rows > kEnough || pairs > kEnough) return false;

  SharedLayout& shared = region.shared;
  const bool has_statistics = is_whole || kernel == Kernel::kKeyValueGradient;
  const int plans = is_whole ? 2 : 1;
  std::int64_t at = 0;
  const auto take = [&](int& offset, std::int64_t bytes) {
    offset = static_cast<int>(at);
    at = align(at + bytes);
  };
  take(shared.box_state, region.has_boxes ? kAlignment : 0);
  take(shared.batch_entries, sides[0].has_origins() ? kEntryStateBytes : 0);
  take(shared.column_offsets, region.has_boxes && !wraps(problem) ? 0 : 8 * plane * box[2]);
  take(shared.offsets, 4 * plans * region.warps * entries);
  // If keys are rows, their biases are in registers.
  const bool has_key_bias = problem.has_key_bias && kernel != Kernel::kKeyValueGradient;
  take(shared.entries, problem.has_relative_bias || has_key_bias ? 4 * plans * region.warps * entries : 0);
  take(shared.key_bias, has_key_bias ? kKeyBiasBytes * region.warps * entries : 0);
  take(shared.masks, 32 * plans * region.warps * entries);
  take(shared.row_indices, 4 * kRows * region.warps);
  const bool has_sums =
      problem.has_relative_bias && (kernel == Kernel::kQueryGradient || kernel == Kernel::kWholeGradient);
  take(shared.sums, has_sums ? bytes_of_sums(region.record) * region.warps : 0);
  if (is_whole && has_sums) {
    const std::int64_t sums = std::int64_t{region.warps} * (region.record + kRecordHeader);
    // The kernel of whole layouts writes one table of sums per CTA to the global memory that other kernels use for the
    // records of tiles. These tables have to fit.
    if (region.gradients > sums) return false;
    take(shared.region_sums, 2 * sizeof(float) * sums);
  }
  // With boxes, the row buffers are separate from the stages. Most kernels then load the next rows while they write
  // results, and need one more buffer per warp for the results.
  const bool has_results =
      region.has_boxes && !has_results_in_rows(kernel, sides[0].coverage == Coverage::kPerEntry) &&
      !(kernel == Kernel::kQueryGradient && has_sums && has_results_in_sums(region.record, head_dim));
  const std::int64_t row_bytes =
      (kRowBuffers[static_cast<int>(kernel)] + has_results) * region.warps * kRows * 2 * head_dim;
  if (region.has_boxes) {
    take(shared.rows, row_bytes);
    at = align(at, kBoxAlignment);
  }
  shared.stages = static_cast<int>(at);
  if (region.has_boxes) {
    const std::int64_t row = 2 * head_dim;
    shared.box_end = static_cast<int>(plane * box[2] * row);
    shared.second = static_cast<int>(align(shared.box_end, kBoxAlignment));
    at = align((boxes_of(kernel) - 1) * shared.second + memory_rows * row);
    shared.boxes_end = static_cast<int>(at);
  } else {
    at = memory_rows * 4 * head_dim;
    take(shared.additional, 2 * kColumns * additional_pairs * 4 * head_dim);
    take(shared.rows, row_bytes);
  }
  take(shared.statistics, has_statistics ? kStatisticsBytes * memory_rows : 0);
  take(shared.table, problem.has_relative_bias ? 4 * (region.table_entries + 2 * region.table_margin) : 0);
  if (region.has_boxes) at = align(at, kBoxAlignment);
  shared.stage_bytes = static_cast<int>(at);
  const std::int64_t bytes = shared.stages + stages * at;
  if (bytes > device.shared_memory) return false;
  shared.bytes = static_cast<int>(bytes);

  region.pitch[0] = 1;
  region.pitch[1] = static_cast<int>(box[0]);
  region.pitch[2] = static_cast<int>(plane);
  for (int i = 0; i < kRank; ++i) region.extent[i] = static_cast<int>(box[i]);
  region.box = static_cast<int>(plane * box[2]);
  region.next_statistic = kStatisticsBytes * (region.group[0] > 1 ? 1 : region.pitch[1]);
  region.next_group = kStatisticsBytes * region.group[1] * region.pitch[1];
  const double mean_pairs = mean_groups[0] * mean_groups[2] * (mean_groups[1] + .5) / 2;
  // Estimate a number of pairs between the mean and the maximum, because the warps of a CTA wait for the warp with the
  // most pairs.
  region.pairs = (mean_pairs + static_cast<double>(lines * line_pairs)) / 2 + static_cast<double>(additional_pairs);
  region.table_capacity = static_cast<int>(entries);
  region.stages = stages;
  region.ctas = std::min(device.shared_memory_multiprocessor / (region.shared.bytes + device.shared_memory_reserved),
                         resident_warps(kernel, head_dim) / region.warps);
  return true;
}

}  // namespace natten_jax::small
