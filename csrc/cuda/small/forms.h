// The form of the portable kernels for small windows, and what it takes. Plain numbers: launches choose by them, and
// Python reads them in every build.
#pragma once

#include <algorithm>
#include <cstdint>

namespace natten_jax::small {

constexpr std::int64_t divide_up(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

/// Rows of a warp's tile: queries, or keys where the kernel owns keys.
inline constexpr int kRows = 16;

/// Columns of a group, which the matrix units take at a time: tokens of the other side.
inline constexpr int kColumns = 8;

/// Widths that kernels are compiled for; narrower heads are padded with zeros in shared memory.
inline constexpr int kHeadDims[] = {32, 64, 128};
inline constexpr int kLargestHeadDim = 128;

/// What the widths of heads are multiples of: 16 bytes are copied at a time.
inline constexpr int kHeadDimStep = 8;

/// The widest heads whose columns the copy engine loads: a row that it swizzles has at most 128 bytes.
inline constexpr int kLargestBoxHeadDim = 64;

/// Most batch entries with layouts of their own that a CTA looks at, a lane of a warp each, and what it keeps of them.
inline constexpr int kEntriesOfCta = 32, kEntryStateBytes = 2080;

/// What the backward kernels know of a query and head: four floats.
inline constexpr int kStatisticsBytes = 16;

/// Bytes of a pair of groups' biases of keys, in floats.
inline constexpr int kKeyBiasBytes = 2 * kColumns * 4;

/// Warps of a CTA for gradients of additional tokens, and threads of one that adds up their sums.
inline constexpr int kAdditionalWarps = 4;
inline constexpr int kAdditionalSumThreads = 128;

/// Pairs of groups of queries that a warp loads at once for such a gradient.
constexpr int additional_pairs_at_once(int head_dim) {
  return head_dim > 64 ? 1 : 2;
}

/// In how many parts the queries of a batch entry are added up for such a gradient. It depends on nothing else, so that
/// results do not depend on other batch entries.
///
/// Args:
///   columns: queries and heads that share a key/value head.
///   additional_kv: additional tokens.
constexpr std::int64_t additional_parts(std::int64_t columns, std::int64_t additional_kv) {
  constexpr std::int64_t kColumnsOfPart = 256, kMostTileParts = 256;
  const std::int64_t tiles = divide_up(additional_kv, kRows),
                     most = std::max<std::int64_t>(kMostTileParts / std::max<std::int64_t>(tiles, 1), 1);
  return std::clamp<std::int64_t>(divide_up(columns, kColumnsOfPart), 1, most);
}

/// What a kernel is compiled for besides its element type and its widest heads. A problem has one of these at most;
/// layouts of batch entries are beside kNone.
enum class Feature { kNone, kRelativeBias, kKeyBias, kWraps };

/// Whose tokens a kernel has as rows.
enum class Owner { kQueries, kKeys };

/// What the kernels are for.
enum class Kernel { kForward, kQueryGradient, kKeyValueGradient, kWholeGradient };

/// Whether a warp writes its results where its rows were, and loads the next item's rows after that. Where batch
/// entries have layouts of their own, boxes have one stage, whose next columns are waited for anyway; without memory
/// for results, a multiprocessor has two CTAs for 7 x 7 windows and heads of 64, of which one computes while the other
/// plans or waits.
constexpr bool has_results_in_rows(Kernel kernel, bool of_entries) {
  return kernel == Kernel::kForward && of_entries;
}

/// Arrays that a stage has boxes of, but for statistics: the two arrays of columns, or what WholeBox names.
constexpr int boxes_of(Kernel kernel) {
  return kernel == Kernel::kWholeGradient ? 5 : 2;
}

/// The warps of a multiprocessor that there are registers for, all of which may be of one CTA.
constexpr int resident_warps(Kernel kernel, int head_dim) {
  constexpr int kWarps[][3] = {{24, 16, 12}, {16, 12, 12}, {16, 8, 8}, {16, 12, 12}};  // by Kernel, of kHeadDims
  return kWarps[static_cast<int>(kernel)][head_dim == 32 ? 0 : head_dim == 64 ? 1 : 2];
}

}  // namespace natten_jax::small
