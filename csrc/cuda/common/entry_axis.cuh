// One token dimension of a batch entry, whose layout may be smaller than the arrays.
#pragma once

#include <cute/config.hpp>

#include "cuda/common/device_axis.h"
#include "cuda/common/launch.cuh"
#include "natten_jax/windows.h"

namespace natten_jax {

/// An origin split by the dilation, rounded down: local coordinate 0 is token `index` of dilation group `group`.
struct Origin {
  int index, group;

  /// The origin at `index`, or zero if `origins` is null.
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

/// Windows of a dimension for the arithmetic of natten_jax/windows.h: the windows of the launch, or the largest that
/// fit an entry's layout.
///
/// `is_plain`: entries have the layout of the launch, and no dimension cuts or wraps windows. A constant of the kernel,
/// which is compiled only for this case if it is true.
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
    // An entry's stride is smaller than the launch's only if the window contains all tokens of a dilation group, or all
    // but one. So the third stride group and all later ones lie past every token.
    return ((index >= stride) + (index >= 2 * stride)) * stride;
  }
  CUTLASS_HOST_DEVICE int dilations(int extent) const { return axis.dilations(extent); }
};

/// Layout of a batch entry, distributed over a warp's lanes, one number per lane. If every lane read all numbers,
/// all would repeatedly read the same part of L2 and wait for each other.
class EntryLayout {
 public:
  /// The layout of the launch.
  EntryLayout() = default;

  /// The layout of a batch entry. Warp-collective, also when its numbers are read.
  ///
  /// Args:
  ///   layouts: [batch, 3, 3]: query origin, query extents, key/value extents; null: the layout of the launch.
  CUTE_DEVICE EntryLayout(const std::int32_t* layouts, int batch) : is_own_(layouts != nullptr) {
    const int lane = min(static_cast<int>(threadIdx.x % 32), kNumbers - 1);
    if (is_own_) of_lane_ = load_written(layouts + batch * kNumbers + lane);
  }

  /// Copy of a layout that a warp keeps in shared memory; `entry` starts as a negative number.
  struct Kept {
    int numbers[kRank * kRank];
    int entry;
  };

  /// The layout of a batch entry, from `kept` or, if that holds another entry, from global memory. Warp-collective.
  CUTE_DEVICE EntryLayout(const std::int32_t* layouts, int batch, Kept& kept) : is_own_(true) {
    const int lane = min(static_cast<int>(threadIdx.x % 32), kNumbers - 1);
    if (kept.entry == batch) {
      of_lane_ = kept.numbers[lane];
    } else {
      of_lane_ = load_written(layouts + batch * kNumbers + lane);
      __syncwarp();
      kept.numbers[lane] = of_lane_;
      kept.entry = batch;
    }
    __syncwarp();
  }

  /// True if the entry has a separate layout.
  CUTE_DEVICE bool is_own() const { return is_own_; }

  CUTE_DEVICE int query_origin(int dimension) const { return number(0, dimension); }
  CUTE_DEVICE int query_extent(int dimension) const { return number(1, dimension); }
  CUTE_DEVICE int kv_extent(int dimension) const { return number(2, dimension); }

 private:
  CUTE_DEVICE int number(int row, int dimension) const {
    return __shfl_sync(0xffffffffu, of_lane_, row * kRank + dimension);
  }

  static constexpr int kNumbers = kRank * kRank;

  bool is_own_ = false;
  int of_lane_ = 0;
};

/// Properties of a dimension that may differ between batch entries.
struct EntryAxis {
  int query_extent, kv_extent;              // tokens of the layout
  int query_local_extent, kv_local_extent;  // tokens of the arrays inside the layout, from the first on
  int query_group_tokens, kv_group_tokens;  // tokens of a dilation group without remainder token
  int kernel_size, stride;
  Origin query_origin, kv_origin;

  /// The dimension in the layout of the launch.
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

  /// The dimension in a separate layout, clamped to the tokens of the launch.
  ///
  /// Args:
  ///   axis: dimension of the launch.
  ///   layout: layout of the entry.
  ///   dimension: number of the dimension in the problem.
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
