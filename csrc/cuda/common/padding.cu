#include <algorithm>
#include <initializer_list>

#include "cuda/common/entry_axis.cuh"
#include "cuda/common/geometry.h"
#include "cuda/common/padding.h"

namespace natten_jax {
namespace {

constexpr int kMostArrays = 3;
constexpr int kThreads = 128;
constexpr int kSegment = 64;          // tokens of a line that a CTA fills at a time
constexpr int kMostBlocks = 1 << 10;  // of a batch entry and array

/// An array whose token is so many bytes, and what its padding is filled with, over and over.
struct PaddedArray {
  void* data;
  std::int64_t token_bytes;
  std::uint32_t word;
  bool has_queries;
};

struct Padding {
  DeviceAxis axis[kRank];
  const std::int32_t* layouts;
  PaddedArray array[kMostArrays];
};

/// Fills bytes from one multiple of the size of words to another; all threads of a CTA.
template <class Word>
CUTE_DEVICE void fill(char* begin, const char* end, Word word) {
  for (char* at = begin + threadIdx.x * sizeof(Word); at < end; at += kThreads * sizeof(Word)) {
    *reinterpret_cast<Word*>(at) = word;
  }
}

/// A CTA fills segments of lines of a batch entry: blockIdx is batch entry, array, one of the CTAs that share them.
__global__ void __launch_bounds__(kThreads) natten_jax_fill_padding(const __grid_constant__ Padding p) {
  allow_next_kernel();
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
  const int segments = (extent[2] + kSegment - 1) / kSegment, lines = extent[0] * extent[1];
  char* const of_entry =
      static_cast<char*>(array.data) + static_cast<std::int64_t>(blockIdx.x) * lines * extent[2] * array.token_bytes;
  for (int i = blockIdx.z; i < lines * segments; i += gridDim.z) {
    const int line = i / segments, x = line / extent[1], y = line - x * extent[1];
    int begin = (i - line * segments) * kSegment;
    const int end = min(begin + kSegment, extent[2]);
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

cudaError_t fill_padding(const Problem& problem, const std::int32_t* layouts, std::initializer_list<PaddedArray> arrays,
                         cudaStream_t stream) {
  Padding p{};
  std::int64_t lines[2] = {1, 1};
  for (int d = 0; d < kRank; ++d) {
    p.axis[d] = device_axis(problem.axes[d], 1, 1);
    const bool is_last = d + 1 == kRank;
    for (const bool has_queries : {false, true}) {
      const std::int64_t extent = has_queries ? p.axis[d].query_local_extent : p.axis[d].kv_local_extent;
      lines[has_queries] =
          saturating_product(lines[has_queries], is_last ? (extent + kSegment - 1) / kSegment : extent);
    }
  }
  p.layouts = layouts;
  unsigned count = 0;
  for (const PaddedArray& array : arrays) {
    if (array.data != nullptr) p.array[count++] = array;
  }
  const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(std::max(lines[0], lines[1]), kMostBlocks));
  return launch(natten_jax_fill_padding,
                {dim3(static_cast<unsigned>(problem.batch), count, blocks), kThreads, 0, stream}, p);
}

/// Zeros for all heads of a token.
PaddedArray zeros(const Problem& problem, void* data, std::int64_t heads, std::int64_t head_dim, bool has_queries) {
  return {data, heads * head_dim * element_bytes(problem.element_type), 0, has_queries};
}

}  // namespace

cudaError_t fill_padding_of_output(const Problem& problem, const Arrays& arrays, cudaStream_t stream) {
  constexpr std::uint32_t kMinusInfinity = 0xff800000u;
  const std::int64_t statistic_bytes = problem.heads * static_cast<std::int64_t>(sizeof(float));
  return fill_padding(problem, arrays.layouts,
                      {zeros(problem, arrays.out, problem.heads, problem.head_dim_v, true),
                       {arrays.logsumexp, statistic_bytes, kMinusInfinity, true},
                       {arrays.remainder, statistic_bytes, 0, true}},
                      stream);
}

cudaError_t fill_padding_of_gradients(const Problem& problem, const Arrays& arrays, bool has_query_gradient,
                                      cudaStream_t stream) {
  void* const query_gradient = has_query_gradient ? arrays.query_gradient : nullptr;
  return fill_padding(problem, arrays.layouts,
                      {zeros(problem, query_gradient, problem.heads, problem.head_dim, true),
                       zeros(problem, arrays.key_gradient, problem.heads_kv, problem.head_dim, false),
                       zeros(problem, arrays.value_gradient, problem.heads_kv, problem.head_dim_v, false)},
                      stream);
}

}  // namespace natten_jax
