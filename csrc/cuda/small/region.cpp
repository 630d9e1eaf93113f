#include "cuda/small/region.h"

#include <algorithm>
#include <array>
#include <functional>
#include <string>

#include "cuda/small/bias_table.h"
#include "cuda/small/region_time.h"

namespace natten_jax::small {
namespace {

/// Bytes of tables and stages start at multiples of this, and boxes at those of the other, as their swizzle has it.
constexpr std::int64_t kAlignment = 128;
constexpr std::int64_t kBoxAlignment = 1024;

/// Most tokens of a dimension that a box spans, and most that neighbors may be apart.
constexpr std::int64_t kLargestBox = 256;
constexpr std::int64_t kLargestBoxDilation = 8;

/// Ends of a layout are looked at closely up to this window.
constexpr std::int64_t kMostLookedAt = 1024;

constexpr std::int64_t kMostRows = std::int64_t{1} << 31;

/// A product that does not wrap around: one that is too large is some number that is too large.
std::int64_t counted(std::int64_t a, std::int64_t b, std::int64_t c) {
  if (a == 0 || b == 0 || c == 0) return 0;
  return a >= kMostRows || b >= kMostRows || c >= kMostRows || a * b >= kMostRows ? kMostRows : a * b * c;
}

std::int64_t align(std::int64_t bytes, std::int64_t alignment = kAlignment) {
  return divide_up(bytes, alignment) * alignment;
}

/// One dimension, seen from the rows of a kernel.
struct Side {
  const Axis& axis;
  bool rows_are_keys;
  Places places;

  /// Whether tokens may begin or end anywhere in a layout.
  bool has_origins() const { return places != Places::kWhole; }

  /// Local rows and columns of the longest dilation group.
  std::int64_t rows() const { return of_group((rows_are_keys ? axis.kv : axis.query).local_extent); }
  std::int64_t columns() const { return of_group((rows_are_keys ? axis.query : axis.kv).local_extent); }

  /// Most columns that some rows see: those of `tiles` tiles that follow each other, the first of which begins at a
  /// multiple of their rows. Where batch entries have layouts of their own, of any lengths, the last ones of such a
  /// layout's keys are as many, and those before are what is left.
  std::int64_t seen(std::int64_t tile, std::int64_t tiles = 1) const {
    if (are_whole()) return columns();
    const std::int64_t inside = seen_inside(tile * tiles);
    return limited(rows_are_keys ? std::max(inside, seen_at_ends(tile, tiles)) : inside);
  }

  /// How many groups of columns `count` rows see on average.
  double mean_groups(std::int64_t count, std::int64_t group) const {
    if (are_whole()) return static_cast<double>(divide_up(columns(), group));
    const double inside = static_cast<double>(divide_up(limited(seen_inside(count)), group));
    if (!rows_are_keys || !looks_at_ends()) return inside;
    const std::int64_t longest = of_group(axis.kv.extent), blocks = divide_up(longest, count);
    double sum = 0;
    std::int64_t looked_at = 0;
    for_ends(count, longest, [&](std::int64_t seen) {
      sum += static_cast<double>(divide_up(std::max<std::int64_t>(seen, 0), group));
      ++looked_at;
    });
    return (sum + inside * static_cast<double>(blocks - looked_at)) / static_cast<double>(blocks);
  }

 private:
  /// So many columns, or all; where the dimension wraps, some may come twice.
  std::int64_t limited(std::int64_t seen) const {
    return axis.window.ends == Ends::kWrap ? seen : std::min(seen, columns());
  }

  /// Whether windows are the whole sequence.
  bool are_whole() const { return axis.query.extent != axis.kv.extent; }

  bool looks_at_ends() const { return !has_origins() && ends() <= kMostLookedAt; }
  std::int64_t ends() const { return axis.window.kernel_size + axis.window.stride; }

  /// The same as `seen` for keys near the ends of a layout, which are seen by more queries, whose windows the end
  /// shifts.
  std::int64_t seen_at_ends(std::int64_t tile, std::int64_t tiles) const {
    const Window& window = axis.window;
    const std::int64_t count = tile * tiles, longest = of_group(axis.kv.extent);
    // Layouts that are longer have ends like those of one of these.
    const std::int64_t all_kinds = 2 * ends() + count * (window.stride + 3);
    const bool looks_at_all =
        places == Places::kOfEntries && axis.kv.local_extent == axis.kv.extent && all_kinds <= kMostLookedAt;
    if (!looks_at_ends() && !looks_at_all) {
      // Keys that have both ends near are seen by the whole layout.
      const bool may_be_short = places == Places::kOfEntries || longest <= 2 * window.kernel_size + count;
      const std::int64_t shifted = window.kernel_size / 2 + window.stride;
      return seen_inside(count) + (may_be_short ? std::max(shifted, window.kernel_size) : shifted);
    }
    std::int64_t most = 0;
    const auto look = [&](std::int64_t seen) { most = std::max(most, seen); };
    for (std::int64_t length = std::max<std::int64_t>(longest - 1, 1); length <= longest; ++length) {
      for_ends(count, length, look);
    }
    for (std::int64_t length = 1; looks_at_all && length <= std::min(longest, all_kinds); ++length) {
      const std::int64_t first_of_last = std::max<std::int64_t>(align(length, tile) - count, 0);
      for (std::int64_t begin = 0; begin < length;) {
        const std::int64_t end = begin < first_of_last ? std::min(begin + count, first_of_last) : length;
        look(seen_between(begin, end, length));
        begin = end;
      }
    }
    return most;
  }

  std::int64_t of_group(std::int64_t extent) const { return divide_up(extent, axis.window.dilation); }

  /// How many columns the keys from one to another of a layout are seen by.
  std::int64_t seen_between(std::int64_t begin, std::int64_t end, std::int64_t length) const {
    if (length < axis.window.kernel_size) return length;
    const auto first_seen = inverse_window_bounds(axis.window, begin, length, length);
    const auto last_seen = inverse_window_bounds(axis.window, end - 1, length, length);
    return last_seen.end - first_seen.begin;
  }

  /// The same as `seen`, away from the ends of the layout.
  std::int64_t seen_inside(std::int64_t count) const {
    const Window& window = axis.window;
    count = std::min(count, rows());
    const std::int64_t steps = divide_up(count - 1, window.stride) * window.stride;
    return window.kernel_size + (rows_are_keys ? count - 1 + window.stride - 1 : steps);
  }

  /// Calls `call` with the columns that blocks of `count` keys near the ends of a layout of `length` are seen by.
  template <class Call>
  void for_ends(std::int64_t count, std::int64_t length, const Call& call) const {
    const Window& window = axis.window;
    if (length < window.kernel_size) {
      for (std::int64_t block = 0; block * count < length; ++block) call(length);
      return;
    }
    const std::int64_t blocks = divide_up(length, count);
    const std::int64_t near = std::min(divide_up(window.kernel_size + window.stride, count) + 1, blocks);
    const auto look = [&](std::int64_t block) {
      call(seen_between(block * count, std::min((block + 1) * count, length), length));
    };
    for (std::int64_t block = 0; block < near; ++block) look(block);
    for (std::int64_t block = std::max(near, blocks - near); block < blocks; ++block) look(block);
  }
};

/// Which dimension of the problem is which of a region's; none where a group does not lie in two dimensions.
bool choose_dimensions(const Side (&sides)[kRank], const std::int64_t (&rows)[kRank],
                       const std::int64_t (&columns)[kRank], int (&dimension)[kRank]) {
  std::array<int, kRank> order{2, 1, 0};
  // Those of the group first, then by how many groups follow each other in a dimension.
  const auto groups = [&](int d) { return divide_up(sides[d].seen(rows[d]), columns[d]); };
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    if ((columns[a] > 1) != (columns[b] > 1)) return columns[a] > 1;
    return groups(a) > groups(b);
  });
  if (columns[order[2]] > 1) return false;
  // In a sequence, or where there is but one token in the others, a line follows the group itself.
  if (columns[order[1]] == 1 && groups(order[1]) == 1) std::swap(order[0], order[1]);
  // The line is the longer one of two dimensions of a group.
  if (columns[order[1]] > 1 && groups(order[0]) > groups(order[1])) std::swap(order[0], order[1]);
  std::copy(order.begin(), order.end(), dimension);
  return true;
}

/// Buffers of 16 rows that a warp has in each stage, by Kernel.
constexpr int kRowBuffers[] = {1, 3, 2, 0};

/// Whether the copy engine can load a problem's columns: heads fill the rows that it swizzles, and there is nothing but
/// one box for each array.
bool can_have_boxes(const Problem& problem, int head_dim) {
  if (head_dim > kLargestBoxHeadDim || problem.head_dim != head_dim || problem.head_dim_v != head_dim) return false;
  if (problem.additional_kv > 0) return false;
  return std::all_of(std::begin(problem.axes), std::end(problem.axes),
                     [](const Axis& axis) { return axis.window.dilation <= kLargestBoxDilation; });
}

/// Whether dilation groups can be computed whole: queries and keys are the same tokens, all of them are there, and have
/// heads of their own. Where every query sees every key, some queries may come without an origin.
bool can_be_whole(const Problem& problem, Places places) {
  if (places != Places::kWhole || problem.heads != problem.heads_kv || wraps(problem)) return false;
  return std::all_of(std::begin(problem.axes), std::end(problem.axes), [](const Axis& axis) {
    const std::int64_t extent = axis.kv.extent;
    return axis.query.extent == extent && axis.query.local_extent == extent && axis.kv.local_extent == extent;
  });
}

/// Widens a box so that pairs of groups of a tile lie multiples of 8 rows apart, and the rows of a group in different
/// banks: rows are permuted by their number modulo 8. False where that cannot be, or where it is too large.
bool widen_box(const Side (&sides)[kRank], const Region& region, const std::int64_t (&groups)[kRank],
               std::int64_t (&box)[kRank]) {
  const int wide = region.group[0], high = region.group[1];
  if (groups[0] > 1 && wide < kColumns) return false;
  // The group's rows: of `wide` that follow each other, `high` times; all eight differ modulo 8.
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

/// Fills in how the table of a relative bias lies in memory.
void lay_out_table(const Problem& problem, Region& region) {
  const TiledDimensions of(region);
  const BiasTable table(problem.axes, of.tile, of.group);
  const auto counted_entries = [](std::int64_t entries) {
    return static_cast<int>(std::min(entries, kMostBiasEntries + 1));
  };
  region.table_entries = counted_entries(table.entries);
  region.gradients = counted_entries(table.gradients);
  for (int i = 0; i < kRank; ++i) region.table_pitch[i] = counted_entries(table.pitch[region.dimension[i]]);
  for (const bool rows_are_keys : {false, true}) {
    const int bytes = rows_are_keys ? -kBytesOfEntry : kBytesOfEntry;
    region.next_entry[rows_are_keys] = bytes * region.table_pitch[region.group[0] > 1 ? 0 : 1];
    region.next_entry_of_group[rows_are_keys] = bytes * region.group[1] * region.table_pitch[1];
  }
}

/// Works out what the sums for its gradient take, given the groups of a tile; false where kernels cannot count them, or
/// the table.
bool lay_out_sums(const Problem& problem, const std::int64_t (&groups)[kRank], Region& region) {
  if (region.table_entries > kMostBiasEntries) return false;
  // Rows beside the only token of a dimension are not hidden: nobody asks for them, but sums would count them.
  for (int i = 0; i < kRank; ++i) {
    if (region.tile[i] > 1 && problem.axes[region.dimension[i]].query.extent == 1) return false;
  }
  const TiledDimensions of(region);
  const RecordLayout record(problem.axes, of.tile, region.dimension[region.group[0] > 1 ? 0 : 1]);
  region.record = static_cast<int>(most_numbers(problem.axes, of.tile, of.group));
  std::int64_t margin = 0, last_entry = 0, last_sum = 0;
  for (int i = 0; i < kRank; ++i) {
    const std::int64_t pitch = region.table_pitch[i], sum_pitch = record.pitch[region.dimension[i]];
    // The last group of a line of pairs may be none of the window's.
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

/// Works out what follows from the number of tiles in each dimension; false where a CTA lacks the memory for it.
bool complete(const Problem& problem, const Side (&sides)[kRank], Kernel kernel, int head_dim, int stages,
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
    region.count = counted(region.count, side.axis.window.dilation, region.regions[i]);
    box[i] = side.seen(region.tile[i], region.tiles[i]);
    const std::int64_t seen = side.seen(region.tile[i]);
    // There, a warp's rows are keys, too.
    const Side keys{side.axis, true, Places::kWhole};
    groups[i] = divide_up(is_whole ? std::max(seen, keys.seen(region.tile[i])) : seen, region.group[i]);
    mean_groups[i] = side.mean_groups(region.tile[i], region.group[i]);
    if (is_whole && region.regions[i] > 1) return false;
  }
  const std::int64_t lines = groups[0] * groups[2], line_pairs = divide_up(groups[1], 2);
  const std::int64_t additional_pairs = divide_up(problem.additional_kv, 2 * kColumns);
  const std::int64_t pairs = lines * line_pairs + additional_pairs;
  // Two are computed at once, of the window or of additional ones, and two more are read ahead.
  const std::int64_t entries = 2 * (divide_up(lines * line_pairs, 2) + divide_up(additional_pairs, 2) + 1);
  if (region.has_boxes && !widen_box(sides, region, groups, box)) return false;
  if (problem.has_relative_bias && !lay_out_sums(problem, groups, region)) return false;
  const std::int64_t plane = box[0] * box[1];
  // The last pair of a line may end past the box, in what belongs to no column.
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
  take(shared.places, region.has_boxes && !wraps(problem) ? 0 : 8 * plane * box[2]);
  take(shared.offsets, 4 * plans * region.warps * entries);
  // Keys have their biases in registers where they are rows.
  const bool has_key_bias = problem.has_key_bias && kernel != Kernel::kKeyValueGradient;
  take(shared.entries, problem.has_relative_bias || has_key_bias ? 4 * plans * region.warps * entries : 0);
  take(shared.key_bias, has_key_bias ? key_bias_buffers(kernel) * kKeyBiasBytes * region.warps * entries : 0);
  take(shared.masks, 32 * plans * region.warps * entries);
  take(shared.row_places, 4 * kRows * region.warps);
  const bool has_sums =
      problem.has_relative_bias && (kernel == Kernel::kQueryGradient || kernel == Kernel::kWholeGradient);
  take(shared.sums, has_sums ? bytes_of_sums(region.record) * region.warps : 0);
  if (is_whole && has_sums) {
    const std::int64_t sums = std::int64_t{region.warps} * (region.record + kRecordHeader);
    // Tables of regions lie in the memory for records of tiles.
    if (region.gradients > sums) return false;
    take(shared.region_sums, 2 * sizeof(float) * sums);
  }
  // Boxes leave rows to the warps, which load some while they write others.
  const std::int64_t row_bytes =
      (kRowBuffers[static_cast<int>(kernel)] + region.has_boxes) * region.warps * kRows * 2 * head_dim;
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
  // The warps of a CTA wait for the one that sees the most.
  region.pairs = (mean_pairs + static_cast<double>(lines * line_pairs)) / 2 + static_cast<double>(additional_pairs);
  region.table = static_cast<int>(entries);
  region.stages = stages;
  region.ctas = std::min(device.shared_memory_multiprocessor / (region.shared.bytes + device.shared_memory_reserved),
                         resident_warps(kernel, head_dim) / region.warps);
  return true;
}

}  // namespace

Problem without_additional(Problem problem) {
  problem.additional_kv = 0;
  return problem;
}

int compiled_head_dim(const Problem& problem) {
  const std::int64_t wider = std::max(problem.head_dim, problem.head_dim_v);
  for (const int head_dim : kHeadDims) {
    if (wider <= head_dim) return head_dim;
  }
  return 0;
}

namespace {

/// The dimensions of a problem, seen from a kernel.
struct Sides {
  Side of[kRank];

  Sides(const Problem& problem, Kernel kernel, Places places)
      : of{{problem.axes[0], kernel == Kernel::kKeyValueGradient, places},
           {problem.axes[1], kernel == Kernel::kKeyValueGradient, places},
           {problem.axes[2], kernel == Kernel::kKeyValueGradient, places}} {}
};

/// Fills in what all regions of a problem with these tiles have in common.
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
  // Rows of arrays are counted in 32 bits.
  for (const std::int64_t rows_of_array : {counted(problem.batch, problem.queries(), problem.heads),
                                           counted(problem.batch, problem.keys(), problem.heads_kv),
                                           counted(problem.batch, problem.additional_kv, problem.heads_kv)}) {
    if (rows_of_array >= kMostRows) {
      return Status::invalid_argument("the form for small windows takes arrays of less than 2^31 tokens and heads");
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

/// Calls `call` for all numbers of tiles that a CTA may have in each dimension.
template <class Call>
void for_each_shape(const Side (&sides)[kRank], int warps, Region& region, const Call& call) {
  int most[kRank];
  for (int i = 0; i < kRank; ++i) {
    const std::int64_t tiles = divide_up(sides[region.dimension[i]].rows(), region.tile[i]);
    most[i] = static_cast<int>(std::min<std::int64_t>(tiles, 16));
  }
  auto& tiles = region.tiles;
  for (tiles[0] = 1; tiles[0] <= std::min(warps, most[0]); ++tiles[0]) {
    for (tiles[1] = 1; tiles[1] <= std::min(warps / tiles[0], most[1]); ++tiles[1]) {
      for (tiles[2] = 1; tiles[2] <= std::min(warps / tiles[0] / tiles[1], most[2]); ++tiles[2]) call();
    }
  }
}

Status too_large() {
  return Status::invalid_argument("the windows of a tile are too large for the form for small windows");
}

}  // namespace

Status for_each_region(const Problem& problem, const std::int64_t (&rows)[kRank], const std::int64_t (&columns)[kRank],
                       Kernel kernel, Places places, const Device& device,
                       const std::function<void(const Region&)>& call) {
  const Sides all(problem, kernel, places);
  const auto& sides = all.of;
  Region candidate{};
  NATTEN_JAX_RETURN_IF_FAILED(begin_region(problem, sides, rows, columns, candidate));
  const int head_dim = compiled_head_dim(problem);
  // The query heads that share a key/value head are one item where their gradients are added up.
  const std::int64_t together = kernel == Kernel::kKeyValueGradient ? problem.heads_per_kv() : 1;
  const std::int64_t items = problem.batch * problem.heads / together;
  const bool is_whole = kernel == Kernel::kWholeGradient;
  if (is_whole && !can_be_whole(problem, places)) return {};
  for (const bool has_boxes : {true, false}) {
    if (has_boxes ? !(device.has_boxes && can_have_boxes(problem, head_dim)) : is_whole) continue;
    candidate.has_boxes = has_boxes;
    for_each_shape(sides, resident_warps(kernel, head_dim), candidate, [&] {
      // Plans of batch entries with layouts of their own have few items, so a second stage pays less there than another
      // CTA: with two stages and three CTAs, NAT's first stage, half of it real, took 58 microseconds on an H100 before
      // its padding was filled, with one stage and five CTAs 48.
      const int most_stages = places == Places::kOfEntries ? 1 : 2;
      for (int stages = 1; stages <= most_stages; ++stages) {
        if (!complete(problem, sides, kernel, head_dim, stages, device, candidate)) continue;
        const Shares shares = share_items(items, candidate, device);
        candidate.items_of_cta = static_cast<int>(shares.items_of_cta * together);
        candidate.nanoseconds = estimate(kernel, head_dim, places, candidate, shares);
        call(candidate);
      }
    });
  }
  return {};
}

Status choose_region(const Problem& problem, const std::int64_t (&rows)[kRank], const std::int64_t (&columns)[kRank],
                     Kernel kernel, Places places, const Device& device, Region& region) {
  bool found = false;
  const auto take_faster = [&](const Region& candidate) {
    if (found && candidate.nanoseconds >= region.nanoseconds) return;
    found = true;
    region = candidate;
  };
  NATTEN_JAX_RETURN_IF_FAILED(for_each_region(problem, rows, columns, kernel, places, device, take_faster));
  return found ? Status() : too_large();
}

Status estimate_pass(const Problem& problem, const TileShapes& tiles, bool is_backward, const Device& device,
                     PassEstimate& estimate) {
  const auto& rows = is_backward ? tiles.kv : tiles.query;
  const auto& columns = is_backward ? tiles.query : tiles.kv;
  estimate = {};
  for (const Kernel kernel : {Kernel::kForward, Kernel::kQueryGradient, Kernel::kKeyValueGradient}) {
    if ((kernel != Kernel::kForward) != is_backward) continue;
    const Problem of_kernel = kernel == Kernel::kKeyValueGradient ? without_additional(problem) : problem;
    Region region{};
    NATTEN_JAX_RETURN_IF_FAILED(choose_region(of_kernel, rows, columns, kernel, Places::kWhole, device, region));
    estimate.seconds += region.nanoseconds / 1e9;
    estimate.launches.push_back({kernel, region});
    // A part of the layout may begin anywhere in it, which can take more memory.
    const Sides of_part(of_kernel, kernel, Places::kParts);
    NATTEN_JAX_RETURN_IF_FAILED(begin_region(of_kernel, of_part.of, rows, columns, region));
    if (!complete(of_kernel, of_part.of, kernel, compiled_head_dim(problem), 1, device, region)) return too_large();
  }
  if (is_backward && problem.additional_kv > 0) estimate.seconds += estimate_additional(problem, device) / 1e9;
  Region whole{};
  if (is_backward &&
      !choose_region(problem, rows, columns, Kernel::kWholeGradient, Places::kWhole, device, whole).failed() &&
      whole.nanoseconds / 1e9 <= estimate.seconds) {
    estimate = {{{Kernel::kWholeGradient, whole}}, whole.nanoseconds / 1e9};
  }
  return {};
}

}  // namespace natten_jax::small
