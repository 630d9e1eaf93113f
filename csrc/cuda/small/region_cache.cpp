#include "cuda/small/region_cache.h"

#include <algorithm>
#include <array>
#include <map>
#include <mutex>

namespace natten_jax::small {
namespace {

/// All that a region depends on.
using Key = std::array<std::int64_t, 9 * kRank + 13>;

Key key_of(const Problem& problem, const std::int64_t (&rows)[kRank], const std::int64_t (&columns)[kRank],
           Kernel kernel, bool has_origins, const Device& device) {
  Key key{};
  auto* at = key.data();
  for (const std::int64_t each :
       {problem.batch, problem.heads, problem.heads_kv, problem.head_dim, problem.head_dim_v, problem.additional_kv,
        static_cast<std::int64_t>(kernel), std::int64_t{has_origins}, std::int64_t{device.shared_memory},
        std::int64_t{device.shared_memory_multiprocessor}, std::int64_t{device.shared_memory_reserved},
        std::int64_t{device.multiprocessors}, std::int64_t{device.has_boxes}}) {
    *at++ = each;
  }
  for (int d = 0; d < kRank; ++d) {
    const Axis& axis = problem.axes[d];
    const Window& window = axis.window;
    for (const std::int64_t each :
         {axis.query.local_extent, axis.kv.local_extent, axis.query.extent, axis.kv.extent, window.kernel_size,
          window.stride, 2 * window.dilation + window.is_causal, rows[d], columns[d]}) {
      *at++ = each;
    }
  }
  return key;
}

/// What is known of a kind of launch.
struct Found {
  Status status;
  Region region;
};

/// More kinds than any program launches; then the cache starts anew.
constexpr std::size_t kMostKinds = 4096;

}  // namespace

Status find_region(const Problem& problem, const std::int64_t (&rows)[kRank], const std::int64_t (&columns)[kRank],
                   Kernel kernel, bool has_origins, const Device& device, Region& region) {
  static std::mutex mutex;
  static auto& found = *new std::map<Key, Found>;  // never destroyed: launches may outlive static objects
  const Key key = key_of(problem, rows, columns, kernel, has_origins, device);
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (const auto known = found.find(key); known != found.end()) {
      region = known->second.region;
      return known->second.status;
    }
  }
  const Status status = choose_region(problem, rows, columns, kernel, has_origins, device, region);
  const std::lock_guard<std::mutex> lock(mutex);
  if (found.size() >= kMostKinds) found.clear();
  found.emplace(key, Found{status, region});
  return status;
}

}  // namespace natten_jax::small
