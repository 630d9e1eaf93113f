// One token dimension as a batch entry has it, whose layout may be smaller than the arrays.
#pragma once

#include <cute/config.hpp>

#include "cuda/common/device_axis.h"
#include "cuda/common/launch.cuh"
#include "natten_jax/windows.h"

namespace natten_jax {

/// An origin split by the dilation, rounded down: local coordinate 0 is token `index` of dilation group `group`.
struct Origin {
  int index, group;

  /// The origin at `index`, or zero where there are no origins.
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

/// The windows of a dimension for the arithmetic of natten_jax/windows.h: those of the launch, or the largest that fit
/// an entry's layout.
///
/// `is_plain`: no entry has a layout of its own, and the windows are shifted inside or end at the query. A constant of
/// the kernel, which then is compiled for these alone.
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
    // Strides are smaller only where a window is all of a dilation group, or all but one of its tokens: a third stride
    // lies past every token, and so does what is behind it.
    return ((index >= stride) + (index >= 2 * stride)) * stride;
  }
  CUTLASS_HOST_DEVICE int dilations(int extent) const { return axis.dilations(extent); }
};

/// A batch entry's layout, a number for each of a warp's lanes: all lanes that ask would ask one part of the
/// second-level cache, time and again, and wait for each other.
class EntryLayout {
 public:
  /// That of the launch.
  EntryLayout() = default;

  /// That of a batch entry; all lanes of a warp take part, also when numbers are asked for.
  ///
  /// Args:
  ///   layouts: [batch, 3, 3]: query origin, query extents, key/value extents; null: that of the launch.
  CUTE_DEVICE EntryLayout(const std::int32_t* layouts, int batch) : is_own_(layouts != nullptr) {
    const int lane = min(static_cast<int>(threadIdx.x % 32), kNumbers - 1);
    if (is_own_) of_lane_ = load_written(layouts + batch * kNumbers + lane);
  }

  /// What a warp keeps of one in shared memory; `entry` starts as a negative number.
  struct Kept {
    int numbers[kRank * kRank];
    int entry;
  };

  /// The same, which is loaded where another one was kept.
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

  /// Whether the entry has one of its own.
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

/// What of a dimension may differ between batch entries.
struct EntryAxis {
  int query_extent, kv_extent;              // tokens of the layout
  int query_local_extent, kv_local_extent;  // those of the arrays' that lie in it, from the first on
  int query_group_tokens, kv_group_tokens;  // those of a dilation group without remainder token
  int kernel_size, stride;
  Origin query_origin, kv_origin;

  /// That of all entries.
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

  /// That of one with a layout of its own, as far as there are tokens for its numbers.
  ///
  /// Args:
  ///   axis: of the launch.
  ///   layout: of the entry.
  ///   dimension: which one of the problem it is.
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
