// One token dimension of a batch entry. The layout of the entry may be smaller than the arrays.
#pragma once

#include <cute/config.hpp>

#include "cuda/common/device_axis.h"
#include "cuda/common/launch.cuh"
#include "natten_jax/windows.h"

namespace natten_jax {

/// An origin, as quotient and remainder of its division by the dilation. The quotient is rounded down. Local coordinate
/// 0 is token `index` of dilation group `group`.
struct Origin {
  int index, group;

  /// Loads and splits `origins[index]`. If `origins` is null, the origin is zero.
  CUTE_DEVICE static Origin load(const std::int32_t* origins, int index, int dilation) {
    return origins == nullptr ? Origin{0, 0} : split(load_written(origins + index), dilation);
  }

  CUTE_DEVICE static Origin split(int origin, int dilation) {
    if (dilation == 1) return {origin, 0};
    int index = origin / dilation, group = origin % dilation;
    if (group < 0) {
      group += dilation;
      --index;
    }
    return {index, group};
  }
};

/// Windows of a batch entry in one dimension, for the functions of natten_jax/windows.h. If the windows of the launch
/// fit the entry's layout, they are the entry's windows. Otherwise, the entry has the largest windows that fit.
///
/// `is_plain`: true if entries have the layout of the launch, and no dimension cuts or wraps windows. It is a constant
/// of the kernel. If it is true, the code for other cases is not compiled.
struct EntryWindows {
  const DeviceAxis& axis;
  int kernel_size, stride;
  Ends ends;

  CUTLASS_HOST_DEVICE EntryWindows(const DeviceAxis& axis, int kernel_size, int stride, bool is_plain = false)
      : axis(axis),
        kernel_size(is_plain ? axis.kernel_size : kernel_size),
        stride(is_plain ? axis.stride : stride),
        ends(is_plain && !axis.is_causal() ? Ends::kShift : axis.ends) {}

  CUTLASS_HOST_DEVICE int stride_group(int index) const {
    if (stride == axis.stride) return axis.stride_group(index);
    // The entry's stride is smaller than the stride of the launch. Its window then contains all tokens of a dilation
    // group, or all but one, and is not smaller than the stride. So all tokens lie in the first two stride groups. Any
    // index past these two groups is assigned to the third.
    return ((index >= stride) + (index >= 2 * stride)) * stride;
  }
  CUTLASS_HOST_DEVICE int dilations(int extent) const { return axis.dilations(extent); }
};

/// Layout of a batch entry. Each lane of a warp loads and holds one number of the layout. If each lane loaded all
/// numbers, all lanes would repeatedly read the same part of L2 and wait for each other.
class EntryLayout {
 public:
  /// Represents the layout of the launch.
  EntryLayout() = default;

  /// Loads the layout of a batch entry. Warp-collective, like the functions that return origins and extents.
  ///
  /// Args:
  ///   layouts: [batch, 3, 3]: query origin, query extents and key/value extents of each entry. Null: all entries have
  ///     the layout of the launch.
  ///   batch: the batch entry.
  CUTE_DEVICE EntryLayout(const std::int32_t* layouts, int batch) : is_separate_(layouts != nullptr) {
    const int lane = min(static_cast<int>(threadIdx.x % 32), kNumbers - 1);
    if (is_separate_) lane_number_ = load_written(layouts + batch * kNumbers + lane);
  }

  /// Copy in shared memory of the last layout that a warp has loaded. `entry` must be initialized to a negative number.
  struct Cache {
    int numbers[kRank * kRank];
    int entry;
  };

  /// Reads the layout of a batch entry from `cache`. If `cache` contains the layout of another entry, loads the layout
  /// from global memory and copies it to `cache`. Warp-collective.
  CUTE_DEVICE EntryLayout(const std::int32_t* layouts, int batch, Cache& cache) : is_separate_(true) {
    const int lane = min(static_cast<int>(threadIdx.x % 32), kNumbers - 1);
    if (cache.entry == batch) {
      lane_number_ = cache.numbers[lane];
    } else {
      lane_number_ = load_written(layouts + batch * kNumbers + lane);
      __syncwarp();
      cache.numbers[lane] = lane_number_;
      cache.entry = batch;
    }
    __syncwarp();
  }

  /// True if the entry has a separate layout, instead of the layout of the launch.
  CUTE_DEVICE bool is_separate() const { return is_separate_; }

  CUTE_DEVICE int query_origin(int dimension) const { return number(0, dimension); }
  CUTE_DEVICE int query_extent(int dimension) const { return number(1, dimension); }
  CUTE_DEVICE int kv_extent(int dimension) const { return number(2, dimension); }

 private:
  CUTE_DEVICE int number(int row, int dimension) const {
    return __shfl_sync(0xffffffffu, lane_number_, row * kRank + dimension);
  }

  static constexpr int kNumbers = kRank * kRank;

  bool is_separate_ = false;
  int lane_number_ = 0;
};

/// Numbers of a dimension that may differ between batch entries.
struct EntryAxis {
  int query_extent, kv_extent;              // extents of the layout
  int query_local_extent, kv_local_extent;  // extents of the part of the arrays that lies in the layout
  int query_group_tokens, kv_group_tokens;  // minimum number of local tokens per dilation group
  int kernel_size, stride;
  Origin query_origin, kv_origin;

  /// Dimension of an entry that has the layout of the launch.
  CUTE_DEVICE EntryAxis(const DeviceAxis& axis, Origin query_origin, Origin kv_origin)
      : query_extent(axis.query_extent),
        kv_extent(axis.kv_extent),
        query_local_extent(axis.query_local_extent),
        kv_local_extent(axis.kv_local_extent),
        query_group_tokens(axis.query_group_tokens),
        kv_group_tokens(axis.kv_group_tokens),
        kernel_size(axis.kernel_size),
        stride(axis.stride),
        query_origin(query_origin),
        kv_origin(kv_origin) {}

  /// Dimension of an entry that has a separate layout. Its numbers are clamped to the extents of the launch.
  ///
  /// Args:
  ///   axis: dimension of the launch.
  ///   layout: layout of the entry.
  ///   dimension: index of the dimension.
  CUTE_DEVICE EntryAxis(const DeviceAxis& axis, const EntryLayout& layout, int dimension)
      : EntryAxis(axis, layout.query_origin(dimension), layout.query_extent(dimension), layout.kv_extent(dimension)) {}

  CUTE_DEVICE EntryAxis(const DeviceAxis& axis, int origin, int queries, int keys) : EntryAxis(axis, {}, Origin{}) {
    const auto within = [](int number, int most) { return min(max(number, 0), max(most, 0)); };
    origin = within(origin, query_extent - query_local_extent);
    query_extent = within(queries, query_extent);
    kv_extent = within(keys, kv_extent);
    query_local_extent = min(max(query_extent - origin, 0), query_local_extent);
    kv_local_extent = min(kv_extent, kv_local_extent);
    query_group_tokens = axis.dilations(query_local_extent);
    kv_group_tokens = axis.dilations(kv_local_extent);
    kernel_size = min(kernel_size, max(axis.dilations(kv_extent), min(kv_extent, 1)));
    stride = max(min(stride, kernel_size), 1);
    this->query_origin = Origin::split(origin, axis.dilation);
  }
};

}  // namespace natten_jax
