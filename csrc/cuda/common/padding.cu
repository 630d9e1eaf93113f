#include <algorithm>
#include <initializer_list>

#include "cuda/common/entry_axis.cuh"
#include "cuda/common/padding.h"

namespace natten_jax {
namespace {

constexpr int kMostArrays = 3;
constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kSegmentBytes = 1 << 13;       // maximum that a warp fills per step; one token if that is larger
constexpr std::int64_t kBlocks = 1 << 11;    // enough CTAs for all SMs
constexpr std::int64_t kFewBlocks = 1 << 8;  // few enough to leave room for other kernels

/// An array whose padding is filled.
struct PaddedArray {
  void* data;
  std::int64_t token_bytes;
  std::uint32_t word;    // padding is filled with copies of this word
  bool has_queries;      // true if its tokens are queries, false if they are keys
  int segment;           // number of tokens that a warp fills per step
  unsigned first_block;  // index of the first CTA that fills this array
  unsigned blocks;       // number of CTAs that fill this array
};

struct Padding {
  DeviceAxis axis[kRank];
  const std::int32_t* layouts;
  int batch;
  int arrays;
  bool is_between;
  PaddedArray array[kMostArrays];
};

/// Fills memory from `begin` to `end` with copies of `word`. Both must be multiples of the size of a word.
/// Warp-collective.
template <class Word>
CUTE_DEVICE void fill(char* begin, const char* end, Word word) {
  for (char* at = begin + threadIdx.x % 32 * sizeof(Word); at < end; at += 32 * sizeof(Word)) {
    *reinterpret_cast<Word*>(at) = word;
  }
}

/// Numbers of segments of an array: per line, per batch entry, and in total. A line consists of the tokens along the
/// last dimension.
struct Segments {
  int per_line;
  std::int64_t per_entry, all;

  CUTLASS_HOST_DEVICE Segments(const Padding& p, const PaddedArray& array) {
    const auto extent = [&](int d) {
      return array.has_queries ? p.axis[d].query_local_extent : p.axis[d].kv_local_extent;
    };
    per_line = (extent(2) + array.segment - 1) / array.segment;
    per_entry = std::int64_t{extent(0)} * extent(1) * per_line;
    all = per_entry * p.batch;
  }
};

/// Fills the padding in each segment. The segments of all batch entries are distributed over the warps in turn. With
/// separate CTAs per entry, the CTAs of the entries with the most padding ended last: the kernel took 35 microseconds
/// if half of the tokens were padding.
CUTE_DEVICE void fill_segments(const Padding& p) {
  int number = 0;
  while (number + 1 < p.arrays && blockIdx.x >= p.array[number + 1].first_block) ++number;
  const PaddedArray& array = p.array[number];
  const Segments segments(p, array);
  const std::int64_t step = std::int64_t{array.blocks} * kWarps;
  for (std::int64_t i = std::int64_t{blockIdx.x - array.first_block} * kWarps + threadIdx.x / 32; i < segments.all;
       i += step) {
    const int batch = static_cast<int>(i / segments.per_entry),
              entry_segment = static_cast<int>(i - batch * segments.per_entry);
    int extent[kRank], real[kRank];
    const EntryLayout layout(p.layouts, batch);
    for (int d = 0; d < kRank; ++d) {
      const EntryAxis entry(p.axis[d], layout, d);
      extent[d] = array.has_queries ? p.axis[d].query_local_extent : p.axis[d].kv_local_extent;
      real[d] = array.has_queries ? entry.query_local_extent : entry.kv_local_extent;
    }
    const int line = entry_segment / segments.per_line, x = line / extent[1], y = line - x * extent[1];
    int begin = (entry_segment - line * segments.per_line) * array.segment;
    const int end = min(begin + array.segment, extent[2]);
    if (x < real[0] && y < real[1]) begin = max(begin, real[2]);
    if (begin >= end) continue;
    const std::int64_t line_of_all = std::int64_t{batch} * extent[0] * extent[1] + line;
    char* const from = static_cast<char*>(array.data) + (line_of_all * extent[2] + begin) * array.token_bytes;
    const char* const to = from + (end - begin) * array.token_bytes;
    if (array.token_bytes % sizeof(uint4) == 0) {
      fill(from, to, make_uint4(array.word, array.word, array.word, array.word));
    } else {
      fill(from, to, array.word);
    }
  }
}

__global__ void __launch_bounds__(kThreads) natten_jax_fill_padding(const __grid_constant__ Padding p) {
  if (p.is_between) wait_for_previous_kernel();
  allow_next_kernel();
  fill_segments(p);
  // Keep the PDL chain transitive: a kernel that waits for this kernel must also wait for the previous kernel.
  wait_for_previous_kernel();
}

cudaError_t fill_padding(const Problem& problem, const std::int32_t* layouts, std::initializer_list<PaddedArray> arrays,
                         cudaStream_t stream, FillTime time) {
  Padding p{};
  p.is_between = time == FillTime::kBetween;
  for (int d = 0; d < kRank; ++d) p.axis[d] = device_axis(problem.axes[d], 1, 1);
  p.layouts = layouts;
  p.batch = static_cast<int>(problem.batch);
  std::int64_t all_bytes = 0;
  const auto bytes_of = [&](const PaddedArray& array) {
    return Segments(p, array).all * array.segment * array.token_bytes;
  };
  for (const PaddedArray& array : arrays) {
    if (array.data == nullptr) continue;
    PaddedArray& added = p.array[p.arrays++];
    added = array;
    added.segment = static_cast<int>(std::max<std::int64_t>(kSegmentBytes / array.token_bytes, 1));
    all_bytes += bytes_of(added);
  }
  if (all_bytes == 0) return cudaSuccess;
  unsigned blocks = 0;
  for (int i = 0; i < p.arrays; ++i) {
    PaddedArray& array = p.array[i];
    const std::int64_t enough = (Segments(p, array).all + kWarps - 1) / kWarps,
                       share = static_cast<std::int64_t>(static_cast<double>(bytes_of(array)) /
                                                         static_cast<double>(all_bytes) *
                                                         (p.is_between ? kFewBlocks : kBlocks));
    array.first_block = blocks;
    array.blocks = static_cast<unsigned>(std::max<std::int64_t>(std::min(enough, share), 1));
    blocks += array.blocks;
  }
  return launch(natten_jax_fill_padding, {dim3(blocks), kThreads, 0, stream, time != FillTime::kAfter}, p);
}

/// An array [batch, tokens, heads, head_dim] whose padding is filled with zeros.
PaddedArray zeros(const Problem& problem, void* data, std::int64_t heads, std::int64_t head_dim, bool has_queries) {
  return {data, heads * head_dim * element_bytes(problem.element_type), 0, has_queries};
}

}  // namespace

cudaError_t fill_padding_of_output(const Problem& problem, const Arrays& arrays, cudaStream_t stream, FillTime time) {
  constexpr std::uint32_t kMinusInfinity = 0xff800000u;
  const std::int64_t statistic_bytes = problem.heads * static_cast<std::int64_t>(sizeof(float));
  return fill_padding(problem, arrays.layouts,
                      {zeros(problem, arrays.out, problem.heads, problem.head_dim_v, true),
                       {arrays.logsumexp, statistic_bytes, kMinusInfinity, true},
                       {arrays.remainder, statistic_bytes, 0, true}},
                      stream, time);
}

cudaError_t fill_padding_of_gradients(const Problem& problem, const Arrays& arrays, bool has_query_gradient,
                                      cudaStream_t stream, FillTime time) {
  void* const query_gradient = has_query_gradient ? arrays.query_gradient : nullptr;
  return fill_padding(problem, arrays.layouts,
                      {zeros(problem, query_gradient, problem.heads, problem.head_dim, true),
                       zeros(problem, arrays.key_gradient, problem.heads_kv, problem.head_dim, false),
                       zeros(problem, arrays.value_gradient, problem.heads_kv, problem.head_dim_v, false)},
                      stream, time);
}

}  // namespace natten_jax
