#include <algorithm>
#include <initializer_list>

#include "cuda/common/entry_axis.cuh"
#include "cuda/common/geometry.h"
#include "cuda/common/padding.h"

namespace natten_jax {
namespace {

constexpr int kMostArrays = 3;
constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kSegmentBytes = 1 << 13;  // of a line that a warp fills at a time: whole tokens, at least one
constexpr unsigned kBlocks = 1u << 11;  // enough for all multiprocessors; each looks at its entry's layout first

/// An array whose token is so many bytes, and what its padding is filled with, over and over.
struct PaddedArray {
  void* data;
  std::int64_t token_bytes;
  std::uint32_t word;
  bool has_queries;
  int segment;  // tokens of a line that a warp fills at a time
};

struct Padding {
  DeviceAxis axis[kRank];
  const std::int32_t* layouts;
  PaddedArray array[kMostArrays];
};

/// Fills bytes from one multiple of the size of words to another; a warp.
template <class Word>
CUTE_DEVICE void fill(char* begin, const char* end, Word word) {
  for (char* at = begin + threadIdx.x % 32 * sizeof(Word); at < end; at += 32 * sizeof(Word)) {
    *reinterpret_cast<Word*>(at) = word;
  }
}

/// Fills segments of lines of a batch entry, of which those that no query or key has are left to it.
CUTE_DEVICE void fill_segments(const Padding& p) {
  const PaddedArray& array = p.array[blockIdx.y];
  int extent[kRank], real[kRank];
  bool is_padded = false;
  const EntryLayout layout(p.layouts, blockIdx.x);
  for (int d = 0; d < kRank; ++d) {
    const EntryAxis entry(p.axis[d], layout, d);
    extent[d] = array.has_queries ? p.axis[d].query_local_extent : p.axis[d].kv_local_extent;
    real[d] = array.has_queries ? entry.query_local_extent : entry.kv_local_extent;
    is_padded = is_padded || real[d] < extent[d];
  }
  if (!is_padded) return;
  const int segments = (extent[2] + array.segment - 1) / array.segment, lines = extent[0] * extent[1];
  char* const of_entry =
      static_cast<char*>(array.data) + static_cast<std::int64_t>(blockIdx.x) * lines * extent[2] * array.token_bytes;
  for (int i = blockIdx.z * kWarps + threadIdx.x / 32; i < lines * segments; i += gridDim.z * kWarps) {
    const int line = i / segments, x = line / extent[1], y = line - x * extent[1];
    int begin = (i - line * segments) * array.segment;
    const int end = min(begin + array.segment, extent[2]);
    if (x < real[0] && y < real[1]) begin = max(begin, real[2]);
    if (begin >= end) continue;
    char* const from = of_entry + (static_cast<std::int64_t>(line) * extent[2] + begin) * array.token_bytes;
    const char* const to = from + (end - begin) * array.token_bytes;
    if (array.token_bytes % sizeof(uint4) == 0) {
      fill(from, to, make_uint4(array.word, array.word, array.word, array.word));
    } else {
      fill(from, to, array.word);
    }
  }
}

/// blockIdx is batch entry, array, one of the CTAs that share its segments.
__global__ void __launch_bounds__(kThreads) natten_jax_fill_padding(const __grid_constant__ Padding p) {
  allow_next_kernel();
  fill_segments(p);
  // What comes after it comes after the kernel that it overlaps with, too.
  wait_for_previous_kernel();
}

cudaError_t fill_padding(const Problem& problem, const std::int32_t* layouts, std::initializer_list<PaddedArray> arrays,
                         cudaStream_t stream, bool overlaps) {
  Padding p{};
  for (int d = 0; d < kRank; ++d) p.axis[d] = device_axis(problem.axes[d], 1, 1);
  p.layouts = layouts;
  unsigned count = 0;
  std::int64_t all = 1;  // segments of that array which has the most
  for (const PaddedArray& array : arrays) {
    if (array.data == nullptr) continue;
    PaddedArray& added = p.array[count++];
    added = array;
    added.segment = static_cast<int>(std::max<std::int64_t>(kSegmentBytes / array.token_bytes, 1));
    const auto extent = [&](int d) -> std::int64_t {
      return array.has_queries ? p.axis[d].query_local_extent : p.axis[d].kv_local_extent;
    };
    all = std::max(all, saturating_product(saturating_product(extent(0), extent(1)),
                                           (extent(2) + added.segment - 1) / added.segment));
  }
  if (count == 0) return cudaSuccess;
  const auto batch = static_cast<unsigned>(problem.batch);
  const std::int64_t most = std::max(kBlocks / (batch * count), 1u);
  const auto blocks = static_cast<unsigned>(std::clamp<std::int64_t>((all + kWarps - 1) / kWarps, 1, most));
  return launch(natten_jax_fill_padding, {dim3(batch, count, blocks), kThreads, 0, stream, overlaps}, p);
}

/// Zeros for all heads of a token.
PaddedArray zeros(const Problem& problem, void* data, std::int64_t heads, std::int64_t head_dim, bool has_queries) {
  return {data, heads * head_dim * element_bytes(problem.element_type), 0, has_queries};
}

}  // namespace

cudaError_t fill_padding_of_output(const Problem& problem, const Arrays& arrays, cudaStream_t stream, bool overlaps) {
  constexpr std::uint32_t kMinusInfinity = 0xff800000u;
  const std::int64_t statistic_bytes = problem.heads * static_cast<std::int64_t>(sizeof(float));
  return fill_padding(problem, arrays.layouts,
                      {zeros(problem, arrays.out, problem.heads, problem.head_dim_v, true),
                       {arrays.logsumexp, statistic_bytes, kMinusInfinity, true},
                       {arrays.remainder, statistic_bytes, 0, true}},
                      stream, overlaps);
}

cudaError_t fill_padding_of_gradients(const Problem& problem, const Arrays& arrays, bool has_query_gradient,
                                      cudaStream_t stream, bool overlaps) {
  void* const query_gradient = has_query_gradient ? arrays.query_gradient : nullptr;
  return fill_padding(problem, arrays.layouts,
                      {zeros(problem, query_gradient, problem.heads, problem.head_dim, true),
                       zeros(problem, arrays.key_gradient, problem.heads_kv, problem.head_dim, false),
                       zeros(problem, arrays.value_gradient, problem.heads_kv, problem.head_dim_v, false)},
                      stream, overlaps);
}

}  // namespace natten_jax
