// Sizes and limits of the portable kernels for small windows. This header compiles without CUDA: host code chooses
// kernels by these constants, and Python reads some of them in every build.
#pragma once

#include <algorithm>
#include <cstdint>

namespace natten_jax::small {

constexpr std::int64_t divide_up(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

/// Rows of a warp's tile: queries, or keys if the kernel owns keys.
inline constexpr int kRows = 16;

/// Columns of a group, the N of an MMA instruction: keys if rows are queries, queries if rows are keys.
inline constexpr int kColumns = 8;

/// Compiled head widths; narrower heads are padded with zeros in shared memory.
inline constexpr int kHeadDims[] = {32, 64, 128};
inline constexpr int kLargestHeadDim = 128;

/// Head widths are multiples of this, because copies take 16 bytes at a time.
inline constexpr int kHeadDimStep = 8;

/// The widest heads whose columns TMA can load: a swizzled row has at most 128 bytes.
inline constexpr int kLargestBoxHeadDim = 64;

/// Maximum number of batch entries with separate layouts that a CTA examines, one per lane; and the bytes of shared
/// memory for them (EntryState).
inline constexpr int kEntriesOfCta = 32, kEntryStateBytes = 2080;

/// Bytes of statistics per query and head in the backward kernels: four floats.
inline constexpr int kStatisticsBytes = 16;

/// Bytes of the key biases, which are floats, of a pair of groups.
inline constexpr int kKeyBiasBytes = 2 * kColumns * 4;

/// Warps of a CTA that computes partial gradients of additional tokens, and threads of a CTA that adds up the partial
/// gradients.
inline constexpr int kAdditionalWarps = 4;
inline constexpr int kAdditionalSumThreads = 128;

/// Returns the number of pairs of query groups that a warp loads at once for the gradients of additional tokens.
constexpr int additional_pairs_at_once(int head_dim) {
  return head_dim > 64 ? 1 : 2;
}

/// Returns the number of parts into which the queries of a batch entry are split for the gradients of additional
/// tokens. The number depends only on the arguments, so that results do not depend on the other batch entries.
///
/// Args:
///   columns: number of queries times the number of query heads that share a key/value head.
///   additional_kv: number of additional tokens.
constexpr std::int64_t additional_parts(std::int64_t columns, std::int64_t additional_kv) {
  constexpr std::int64_t kColumnsOfPart = 256, kMostTileParts = 256;
  const std::int64_t tiles = divide_up(additional_kv, kRows),
                     most = std::max<std::int64_t>(kMostTileParts / std::max<std::int64_t>(tiles, 1), 1);
  return std::clamp<std::int64_t>(divide_up(columns, kColumnsOfPart), 1, most);
}

/// Optional feature for which a kernel is compiled. A problem has at most one of these features. Kernels with kNone
/// also support per-entry layouts.
enum class Feature { kNone, kRelativeBias, kKeyBias, kWraps };

/// The tokens that a kernel owns: they are the rows of its tiles.
enum class Owner { kQueries, kKeys };

/// The role of a kernel.
enum class Kernel { kForward, kQueryGradient, kKeyValueGradient, kWholeGradient };

/// True if a warp stages its results in the memory of its rows, and loads the next item's rows only afterwards. This
/// costs little with per-entry layouts: boxes then have one stage, so that the kernel has to wait for the next columns
/// anyway. Without a separate buffer for results, two CTAs fit on an SM for 7 x 7 windows and heads of 64: one computes
/// while the other plans or waits.
constexpr bool has_results_in_rows(Kernel kernel, bool per_entry) {
  return kernel == Kernel::kForward && per_entry;
}

/// Returns the number of boxes in a stage, not counting the box of statistics. The kernel of whole layouts has the
/// boxes of WholeBox; the other kernels have one box for each of two arrays of columns.
constexpr int boxes_of(Kernel kernel) {
  return kernel == Kernel::kWholeGradient ? 5 : 2;
}

/// Returns the maximum number of warps per SM that the registers allow; all of them may belong to one CTA.
constexpr int resident_warps(Kernel kernel, int head_dim) {
  constexpr int kWarps[][3] = {{24, 16, 12}, {16, 12, 12}, {16, 8, 8}, {16, 12, 12}};  // by Kernel and kHeadDims
  return kWarps[static_cast<int>(kernel)][head_dim == 32 ? 0 : head_dim == 64 ? 1 : 2];
}

}  // namespace natten_jax::small
