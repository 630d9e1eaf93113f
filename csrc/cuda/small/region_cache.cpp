#include "cuda/small/region_cache.h"

#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "natten_jax/axis_fields.h"

namespace natten_jax::small {
namespace {

/// Cache key: all values that a region depends on.
using Key = std::vector<std::int64_t>;

/// Returns the cache key of a launch. Structured bindings name every field of a struct, so that a new field is a
/// compile error until this function handles it.
Key key_of(const Problem& problem, const std::int64_t (&rows)[kRank], const std::int64_t (&columns)[kRank],
           Kernel kernel, Coverage coverage, const Device& device) {
  const auto& [element_type, batch, heads, heads_kv, head_dim, head_dim_v, additional_kv, has_relative_bias,
               has_key_bias, scale, axes, out_type] = problem;
  const auto& [shared_memory, multiprocessor_memory, reserved, multiprocessors, has_boxes] = device;
  static_cast<void>(element_type);  // all supported types have 16 bits
  static_cast<void>(out_type);      // all supported types have 16 bits
  static_cast<void>(scale);
  Key key;
  key.reserve(15 + kRank * (kFieldsOfAxis + 4));
  key.insert(key.end(),
             {batch, heads, heads_kv, head_dim, head_dim_v, additional_kv, std::int64_t{has_relative_bias},
              std::int64_t{has_key_bias}, static_cast<std::int64_t>(coverage), static_cast<std::int64_t>(kernel),
              std::int64_t{shared_memory}, std::int64_t{multiprocessor_memory}, std::int64_t{reserved},
              std::int64_t{multiprocessors}, std::int64_t{has_boxes}});
  for (int d = 0; d < kRank; ++d) {
    for (const AxisField& field : kAxisFields) key.push_back(field.get(axes[d]));
    for (const Tokens& tokens : {axes[d].query, axes[d].kv}) {
      const auto& [extent, local_extent, origin] = tokens;
      static_cast<void>(extent);  // one of kAxisFields
      static_cast<void>(origin);  // kernels read it on the device; regions support any origin
      key.push_back(local_extent);
    }
    key.push_back(rows[d]);
    key.push_back(columns[d]);
  }
  return key;
}

/// The cached result of find_region for a cache key.
struct CachedRegion {
  Status status;
  Region region;
};

/// Maximum number of cached results, more than a program needs. A full cache is cleared.
constexpr std::size_t kMostCached = 4096;

/// Returns the cached value of a key, or computes it with `find()`.
template <class Value, class Find>
Value find_cached(const Key& key, const Find& find) {
  static std::mutex mutex;
  static auto& all = *new std::map<Key, Value>;  // never destroyed: launches may outlive static objects
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (const auto entry = all.find(key); entry != all.end()) return entry->second;
  }
  const Value value = find();
  const std::lock_guard<std::mutex> lock(mutex);
  if (all.size() >= kMostCached) all.clear();
  all.emplace(key, value);
  return value;
}

}  // namespace

Status find_region(const Problem& problem, const std::int64_t (&rows)[kRank], const std::int64_t (&columns)[kRank],
                   Kernel kernel, Coverage coverage, const Device& device, Region& region) {
  const Key key = key_of(problem, rows, columns, kernel, coverage, device);
  const CachedRegion cached = find_cached<CachedRegion>(key, [&] {
    CachedRegion result{};
    result.status = choose_region(problem, rows, columns, kernel, coverage, device, result.region);
    return result;
  });
  region = cached.region;
  return cached.status;
}

RingShape find_gradient_ring(const Problem& problem, Coverage coverage, RingLoads loads, const Device& device) {
  constexpr std::int64_t kAnyTile[kRank] = {};
  Key key = key_of(problem, kAnyTile, kAnyTile, Kernel::kKeyValueGradient, coverage, device);
  key.push_back(static_cast<std::int64_t>(loads));
  return find_cached<RingShape>(key, [&] {
    RingShape ring = choose_gradient_ring(problem, coverage, loads, device);
    balance_ring(problem, Kernel::kKeyValueGradient, device, ring);
    return ring;
  });
}

RingShape find_ring(const Problem& problem, const std::int64_t (&rows)[kRank], const std::int64_t (&columns)[kRank],
                    Kernel kernel, Coverage coverage, RingLoads loads, const Device& device) {
  Key key = key_of(problem, rows, columns, kernel, coverage, device);
  key.push_back(static_cast<std::int64_t>(loads));
  return find_cached<RingShape>(key, [&] {
    Region region{};
    const Status status = choose_region(problem, rows, columns, kernel, coverage, device, region);
    if (status.failed()) return RingShape{};
    RingShape ring = choose_faster_ring(region, problem, rows, columns, kernel, coverage, loads, device);
    balance_ring(problem, kernel, device, ring);
    return ring;
  });
}

}  // namespace natten_jax::small
